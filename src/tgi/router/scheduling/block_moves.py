"""UnconfirmedMoves: block moves that were put into a Command, until a Step proves that the shard has obeyed it.

The shard confirms no Command, but the window does (rule 6): a Step beyond `seen + W` cannot have been launched before a
later Command came, and Commands are obeyed in order. What is not confirmed when the stream is lost may or may not have
happened, so every prefix that counts on it is given up.
"""

from __future__ import annotations

from collections import deque

from tgi.router.memory.allocator import Allocator
from tgi.router.memory.moves import Moves


class UnconfirmedMoves:
    def __init__(self) -> None:
        self._said: deque[tuple[int, Moves]] = deque()  # with the `seen` of their Command

    def say(self, seen: int, moves: Moves) -> None:
        if moves:
            self._said.append((seen, moves))

    def confirm(self, step_number: int, window: int) -> None:
        """This Step has come."""
        while self._said and self._said[0][0] + window < step_number:
            self._said.popleft()

    def stream_lost(self, allocator: Allocator) -> None:
        """No row may be live."""
        if self._said:
            allocator.forget(moves for _, moves in self._said)
        self.clear()

    def clear(self) -> None:
        """The blocks are gone."""
        self._said.clear()
