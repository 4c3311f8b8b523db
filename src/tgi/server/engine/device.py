"""Device: the seam between the engine's decisions and whatever computes them (the model runner; a fake in tests)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tgi.server.batch.step import RowChanges, StepPlan
from tgi.shard_client.messages import Admit


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the model says of the tokens that the plan's `scoring` names, in their order."""

    logprobs: npt.NDArray[np.float32]  # [p]
    top_ids: npt.NDArray[np.int64]  # [p, most asked for], best first
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step chose, for the rows of the plan with `samples` that did not sit out, in their order."""

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    is_nan: npt.NDArray[np.bool_]
    top_ids: npt.NDArray[np.int64] | None = None  # [rows, most asked for, and room for ties], best first
    top_logprobs: npt.NDArray[np.float32] | None = None
    prompt_scores: PromptScores | None = None  # None: no token of the step scored the next
    forward_ns: int = 0


@dataclass(frozen=True, slots=True)
class Constraint:
    """What grammars say about a step's choices: those of the rows of the plan with `samples`, in their order."""

    takes: npt.NDArray[np.bool_]  # [choices]; the others are not made: those rows sit the step out
    masked: npt.NDArray[np.int64]  # [m], which of the choices that are made have a mask
    masks: npt.NDArray[np.int32]  # [m, ceil(vocab / 32)]: bit i % 32 of word i // 32 is set where id i may be chosen


class Device(Protocol):
    """Everything acts as if done in the order of the calls (rule 1). Only `collect` waits."""

    depth: int  # steps that may be in flight before one must be collected: 1 where launching is computing, else 2

    @property
    def max_blocks(self) -> int:
        """Blocks that one row can have: the width of its block table."""
        ...

    def check(self, admit: Admit) -> str | None:
        """Why this request cannot run here, or None. Changes nothing."""
        ...

    def apply(self, changes: RowChanges) -> None: ...

    def launch(self, plan: StepPlan) -> object:
        """Start the step; the result is handed to `collect`, oldest first. Raises without having changed any row
        (rule 3). The same as `forward` and then `choose` without a constraint."""
        ...

    def forward(self, plan: StepPlan) -> object:
        """Start the step up to its choices: no row has changed yet. `choose` comes before the next step."""
        ...

    def has_forwarded(self, launched: object) -> bool:
        """Has the device come to where it waits for `choose`?"""
        ...

    def choose(self, launched: object, constraint: Constraint | None = None) -> None:
        """Start the rest of the step. A row that sits out is as if it had not been in it. Raises without having changed
        any row."""
        ...

    def collect(self, launched: object) -> Chosen: ...

    def idle(self) -> None:
        """A tiny operation that shows that the device still answers."""
        ...
