"""The text of one answer as its tokens arrive: decoding, special tokens and stop strings in one place.

Streams, plain answers and tools all read from here, so streamed text equals plain text. Knows no requests and no HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tgi.text.stop_strings import StopMatch, StopMatcher

if TYPE_CHECKING:
    from tgi.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    text: str  # newly visible; of a special token its own text, which is no part of the answer
    special: bool
    stop: str | None  # the stop string that ended the answer with this token


class TextStream:
    """One per answer. Held back is only what may become a stop string, and nothing with `include_stop`.

    The answer's text is all pieces that are not special, joined, and `finish()`. A stop string cuts it: right behind
    itself with `include_stop`, else right before; nothing may be pushed after it. Stop strings that hold the text of a
    special token are sought in the text with special tokens spelled out, all others in the visible text. Those that end
    within the first `min_tokens` tokens do not count.
    """

    __slots__ = (
        "_decode",
        "_detokenizer",
        "_early",
        "_held",
        "_include_stop",
        "_marked",
        "_parts",
        "_plain",
        "_special_ids",
        "_tokenizer",
        "_trail",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: bytes,
        stop_strings: tuple[str, ...],
        include_stop: bool,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._detokenizer = tokenizer.detokenizer(prompt_ids)
        self._decode = self._detokenizer.push
        self._include_stop = include_stop
        self._early = min_tokens  # tokens still to come within which no stop string counts; below 0 it does
        self._parts: list[str] = []
        self._held = ""  # visible text that is not given out yet
        self._plain: StopMatcher | None = None
        self._marked: StopMatcher | None = None  # for stop strings with special tokens in them
        # The last pieces that `_marked` read, as (characters, visible); as far back as its candidate reaches.
        self._trail: list[tuple[int, bool]] = []
        if stop_strings:
            marked = tuple(stop for stop in stop_strings if tokenizer.holds_special(stop))
            plain = tuple(stop for stop in stop_strings if stop not in marked)
            self._plain = StopMatcher(plain) if plain else None
            self._marked = StopMatcher(marked) if marked else None

    @property
    def text(self) -> str:
        """The whole answer so far, as given out."""
        return "".join(self._parts)

    def push(self, token_id: int) -> Piece:
        self._early -= 1
        if token_id in self._special_ids:
            return self._push_special(token_id)
        text = self._decode(token_id)
        if not text:
            return _NOTHING
        if self._plain is not None or self._marked is not None:
            return self._push_watched(text)
        self._parts.append(text)
        return Piece(text, False, None)

    def finish(self) -> str:
        """Give out what was held back or incomplete. For an end that is no stop string."""
        text = self._held + self._detokenizer.finish()
        self._held = ""
        self._parts.append(text)
        return text

    def _push_watched(self, text: str) -> Piece:
        plain, marked = self._plain, self._marked
        found = self._find(plain, text) if plain is not None else None
        visible_len = len(found.stop) if found else 0
        if marked is not None:
            also = self._find(marked, text)
            self._trail.append((also.end if also else len(text), True))
            if also and (found is None or (also.end, -len(also.stop)) < (found.end, -len(found.stop))):
                found = also
                visible_len = self._visible_of_last(len(also.stop))
        seen = self._held + text
        if found is not None:
            keep = len(self._held) + found.end - (0 if self._include_stop else visible_len)
            return self._give(seen[:keep], "", found.stop)
        held = 0
        if not self._include_stop:
            held = plain.held if plain is not None else 0
            if marked is not None:
                held = max(held, self._visible_of_last(marked.held))
        self._forget()
        keep = len(seen) - held
        return self._give(seen[:keep], seen[keep:], None)

    def _push_special(self, token_id: int) -> Piece:
        literal = self._tokenizer.token_text(token_id)
        if self._marked is None or not literal:
            return Piece(literal, True, None)
        found = self._find(self._marked, literal)
        self._trail.append((found.end if found else len(literal), False))
        if found is None:
            self._forget()
            return Piece(literal, True, None)
        visible_len = 0 if self._include_stop else self._visible_of_last(len(found.stop))
        rest = self._held[: len(self._held) - visible_len]
        if rest:
            # Text held back for another stop string must still go out, and there is no later token to carry it.
            return self._give(rest, "", found.stop)
        self._held = ""
        return Piece(literal, True, found.stop)

    def _find(self, matcher: StopMatcher, text: str) -> StopMatch | None:
        if self._early < 0:
            return matcher.feed(text)
        matcher.pass_over(text)
        return None

    def _give(self, text: str, held: str, stop: str | None) -> Piece:
        self._held = held
        if text:
            self._parts.append(text)
        return Piece(text, False, stop)

    def _forget(self) -> None:
        if self._marked is not None and not self._marked.held:
            self._trail.clear()

    def _visible_of_last(self, num_characters: int) -> int:
        """How many of the last characters that `_marked` read are visible ones."""
        visible = 0
        for length, is_visible in reversed(self._trail):
            if num_characters <= 0:
                break
            taken = min(length, num_characters)
            visible += taken if is_visible else 0
            num_characters -= taken
        return visible


_NOTHING = Piece("", False, None)
