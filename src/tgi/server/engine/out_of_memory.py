"""Out of memory: which exceptions say so, what gives memory back, and how a step becomes smaller."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace

import numpy as np
import torch

from tgi.server.batch.step import Scoring, StepPlan

log = logging.getLogger(__name__)

CPU_WORDS = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")  # a RuntimeError, to torch
RECOVERY_STEPS = 64  # without a fault, until steps may be larger again
LOG_EVERY_S = 60.0


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in CPU_WORDS)


def release_memory() -> None:
    """What a failed step has left behind goes back to the device: its tensors may hang in the traceback's frames."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def split(plan: StepPlan) -> tuple[StepPlan, StepPlan] | None:
    """Two smaller steps that do the same one after the other: half of the rows each; of a lone row half of its tokens.
    None where there is one token."""
    if plan.num_rows > 1:
        middle = plan.num_rows // 2
        return plan.part(0, middle), plan.part(middle, plan.num_rows)
    if plan.num_tokens < 2:
        return None
    half = plan.num_tokens // 2
    first, second = _split_scoring(plan.scoring, half)
    lens = plan.query_lens
    return (
        replace(
            plan,
            query_lens=np.full_like(lens, half),
            samples=np.zeros(1, np.bool_),
            ids=plan.ids[:half],
            scoring=first,
        ),
        replace(plan, starts=plan.starts + half, query_lens=lens - half, ids=plan.ids[half:], scoring=second),
    )


def _split_scoring(scoring: Scoring | None, half: int) -> tuple[Scoring | None, Scoring | None]:
    if scoring is None:
        return None, None
    counts = np.minimum(scoring.counts, half)
    count = int(counts[0])
    return (
        Scoring(counts, scoring.targets[:count], scoring.top_n),
        Scoring(scoring.counts - counts, scoring.targets[count:], scoring.top_n),
    )


class Squeeze:
    """How many prompt tokens a step may have after memory ran out: half of what failed; a quarter more after some steps
    without a fault."""

    def __init__(self) -> None:
        self.count = 0  # times that memory ran out
        self._limit: int | None = None
        self._calm = 0  # steps since
        self._logged_at = -LOG_EVERY_S

    def note(self, plan: StepPlan, error: BaseException) -> None:
        """Memory ran out in this step."""
        self.count += 1
        self._calm = 0
        self._limit = max(1, plan.num_tokens // 2)
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning(
                "out of memory in step %d (%d rows, %d tokens; %d times so far): smaller steps follow: %s",
                plan.number,
                plan.num_rows,
                plan.num_tokens,
                self.count,
                error,
            )

    def limit(self, budget: int) -> int:
        """Of a step's prompt tokens, where `budget` would be right."""
        if self._limit is None:
            return budget
        self._calm += 1
        if self._calm >= RECOVERY_STEPS:
            self._calm = 0
            self._limit += max(1, self._limit // 4)
        if self._limit >= budget:
            self._limit = None
            return budget
        return self._limit
