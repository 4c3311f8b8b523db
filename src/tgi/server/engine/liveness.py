"""The liveness word: what the device's thread is doing, readable from any other thread without asking it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

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
        self._word = Word(Phase.STARTING, 0, time.monotonic(), STARTING_S)

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
        self._word = Word(phase, step, time.monotonic(), limit)

    def wait(self) -> None:
        """A follower waits for rank 0, for as long as that takes: it beats no device, and rank 0 answers for itself."""
        self._word = Word(Phase.IDLE, self._word.step, time.monotonic(), math.inf)

    def read(self) -> Health:
        word = self._word
        return Health(word.phase, word.step, time.monotonic() - word.since, word.hung_after_s)
