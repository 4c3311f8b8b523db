"""Finds stop strings in a text that arrives in pieces, and how much of its end may still become one.

Where the pieces begin and end makes no difference: the earliest end of any stop string counts, and of several that end
there the longest. Knows no tokens.
"""

from __future__ import annotations

from typing import NamedTuple


class StopMatch(NamedTuple):
    stop: str
    end: int  # characters into the piece in which it ended


class _Automaton:
    """Knuth-Morris-Pratt for one stop string: `state` is the longest prefix that the text so far ends with."""

    __slots__ = ("_borders", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        # _borders[k]: the longest proper prefix of stop[:k] that is its end too. Grown as far as matches ever reach.
        self._borders = [0, 0]

    def feed(self, text: str, limit: int) -> int:
        """Read text[:limit]; the end of the first occurrence, or -1."""
        stop, state = self.stop, self.state
        begin = 0
        if not state:
            begin = text.find(stop[0], 0, limit)
            if begin < 0:
                return -1
        for i in range(begin, limit):
            character = text[i]
            while state and stop[state] != character:
                state = self._border(state)
            if stop[state] == character:
                state += 1
                if state == len(stop):
                    return i + 1
        self.state = state
        return -1

    def pass_over(self, text: str) -> None:
        """Read all of a text; occurrences that end in it do not count."""
        begin = 0
        while (end := self.feed(text[begin:], len(text) - begin)) >= 0:
            begin += end
            self.state = self._border(len(self.stop))

    def _border(self, length: int) -> int:
        borders, stop = self._borders, self.stop
        while len(borders) <= length:
            last = stop[len(borders) - 1]
            border = borders[-1]
            while border and stop[border] != last:
                border = borders[border]
            borders.append(border + 1 if stop[border] == last else 0)
        return borders[length]


class StopMatcher:
    """Feed it a text piece by piece. Not to be fed after a match."""

    __slots__ = ("_automata", "held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops) if stop]
        self.held = 0  # characters at the text's end that are a proper prefix of a stop string

    def feed(self, text: str) -> StopMatch | None:
        best: StopMatch | None = None
        limit = len(text)
        for automaton in self._automata:
            end = automaton.feed(text, limit)
            if end >= 0 and (best is None or end < limit or len(automaton.stop) > len(best.stop)):
                best = StopMatch(automaton.stop, end)
                limit = end
        if best is None:
            self._hold()
        return best

    def pass_over(self, text: str) -> None:
        """Read a text in which no stop string may end. One that begins in it may end in what is fed later."""
        for automaton in self._automata:
            automaton.pass_over(text)
        self._hold()

    def _hold(self) -> None:
        self.held = max([automaton.state for automaton in self._automata], default=0)
