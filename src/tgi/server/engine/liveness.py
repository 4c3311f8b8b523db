"""The liveness word: what the device's thread is doing, readable from any other thread without asking it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from tgi.enums import Phase
from tgi.shard_client.messages import Health

STARTING_S = 30 * 60.0
HUNG_AFTER_S = 30.0  # unless set otherwise
STEP_FACTOR = 20.0
IDLE_BEAT_S = 5.0  # at most
BEATS = 6  # that may be missed while idle


@dataclass(frozen=True, slots=True)
class Word:
    phase: Phase
    step: int
    since: float  # time.monotonic()
    hung_after_s: float


class Liveness:
    """One writer, many readers: the word is replaced as a whole, never changed."""

    def __init__(self, hung_after_s: float = HUNG_AFTER_S) -> None:
        """`hung_after_s`: the least time after which a running step counts as hung."""
        self._hung_after_s = hung_after_s
        self.beat_s = min(IDLE_BEAT_S, hung_after_s / BEATS)  # of an idle loop
        self._entered = self._word = Word(Phase.STARTING, 0, time.monotonic(), STARTING_S)
        self._num_compiling = 0  # compilations that have begun since, one within the other

    def enter(self, phase: Phase, step: int = 0, estimate_s: float = 0.0) -> None:
        """`estimate_s`: how long the step should take."""
        if phase is Phase.RUNNING:
            limit = max(self._hung_after_s, STEP_FACTOR * estimate_s)
        elif phase is Phase.IDLE:
            limit = self._hung_after_s
        elif phase is Phase.FAILED:
            limit = 0.0
        else:
            limit = STARTING_S
        self._enter(Word(phase, step, time.monotonic(), limit))

    def follow(self, phase: Phase, step: int | None = None) -> None:
        """A follower waits for rank 0, or does what that has sent, for as long as it takes: neither can it tell its own
        time from that of the others, nor can it stop without stopping rank 0, which answers for all. `step`: None
        where it is the same as before."""
        self._enter(Word(phase, self._word.step if step is None else step, time.monotonic(), math.inf))

    def compiling(self) -> None:
        """A kernel is compiled in the midst of what was entered, until `compiled`, or until something is entered."""
        self._num_compiling += 1
        if self._num_compiling == 1:
            self._word = Word(Phase.COMPILING, self._word.step, time.monotonic(), STARTING_S)

    def compiled(self) -> None:
        """What was entered goes on; its time counts from now."""
        self._num_compiling -= 1
        if self._num_compiling == 0:
            self._word = replace(self._entered, since=time.monotonic())
        self._num_compiling = max(self._num_compiling, 0)

    def _enter(self, word: Word) -> None:
        self._num_compiling = 0
        self._entered = self._word = word

    def read(self) -> Health:
        word = self._word
        return Health(word.phase, word.step, time.monotonic() - word.since, word.hung_after_s)
