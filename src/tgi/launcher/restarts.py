"""How often what has died may be started again, and after which pause. Knows no processes and no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

LIMIT = 5
WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
TOGETHER_S = 1.0  # deaths of two programs that are one: the one has taken the other along, or both had one cause


@dataclass(frozen=True, slots=True)
class Restart:
    number: int  # 1 … LIMIT
    delay_s: float


class Restarts:
    """At most LIMIT restarts within WINDOW_S, shards' and router's together, while no request finishes.

    A finished request shows that the server works between the deaths: the count and the pauses begin anew.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, monotonic."""
        self._clock = clock
        self._times: deque[float] = deque()
        self._last = ""  # whose death was the last of them

    def note_finished(self) -> None:
        self._times.clear()

    def next(self, program: str) -> Restart | None:
        """The restart that the death of `program` asks for, which counts from now on; None when it would be one too
        many."""
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        if self._times and program != self._last and now - self._times[-1] <= TOGETHER_S:
            return Restart(len(self._times), delay_s(len(self._times)))
        if len(self._times) == LIMIT:
            return None
        self._times.append(now)
        self._last = program
        return Restart(len(self._times), delay_s(len(self._times)))


def delay_s(number: int) -> float:
    """0, 0.5, 1, 2, 4 … s before restart 1, 2, 3, 4, 5 …"""
    return 0.0 if number == 1 else FIRST_DELAY_S * 2 ** (number - 2)
