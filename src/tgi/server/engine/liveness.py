"""The liveness word: what the device's thread is doing, readable from any other thread without asking it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tgi.enums import Phase
from tgi.shard_client.messages import Health

STARTING_S = 30 * 60.0
STEP_AT_LEAST_S = 30.0
STEP_FACTOR = 20.0
IDLE_BEAT_S = 5.0
IDLE_HUNG_S = 6 * IDLE_BEAT_S


@dataclass(frozen=True, slots=True)
class Word:
    phase: Phase
    step: int
    since: float  # time.monotonic()
    hung_after_s: float


class Liveness:
    """One writer, many readers: the word is replaced as a whole, never changed."""

    def __init__(self) -> None:
        self._word = Word(Phase.STARTING, 0, time.monotonic(), STARTING_S)

    def enter(self, phase: Phase, step: int = 0, estimate_s: float = 0.0) -> None:
        """`estimate_s`: how long the step should take."""
        if phase is Phase.RUNNING:
            limit = max(STEP_AT_LEAST_S, STEP_FACTOR * estimate_s)
        elif phase is Phase.IDLE:
            limit = IDLE_HUNG_S
        elif phase is Phase.FAILED:
            limit = 0.0
        else:
            limit = STARTING_S
        self._word = Word(phase, step, time.monotonic(), limit)

    def read(self) -> Health:
        word = self._word
        return Health(word.phase, word.step, time.monotonic() - word.since, word.hung_after_s)
