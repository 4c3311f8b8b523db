"""Device: the seam between the engine's decisions and whatever computes them (the model runner; a fake in tests)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tgi.server.batch.step import RowChanges, StepPlan
from tgi.shard_client.messages import Admit


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step chose, for the rows of the plan with `samples`, in their order."""

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    is_nan: npt.NDArray[np.bool_]
    top_ids: npt.NDArray[np.int64] | None = None  # [rows, most asked for, and room for ties], best first
    top_logprobs: npt.NDArray[np.float32] | None = None
    forward_ns: int = 0


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
        (rule 3)."""
        ...

    def collect(self, launched: object) -> Chosen: ...

    def idle(self) -> None:
        """A tiny operation that shows that the device still answers."""
        ...
