"""Scheme: the form in which a linear layer's weight is kept and applied. Layers decide what a rank keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tgi.server.ops.matmul import LinearKernel
from tgi.server.ops.moe import Activation, ExpertsKernel
from tgi.server.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a checkpoint module's weight, of full extent where this rank keeps all of it."""

    module: str  # "model.layers.0.self_attn.q_proj"
    shape: tuple[int, int]  # [out, in] of the module's whole weight
    rows: slice  # output features of this rank
    columns: slice  # input features of this rank
    bias: bool
    transposed: bool = False  # the file keeps the weight [in, out]
    stack: tuple[int, int] | None = None  # (index, count): the file keeps `count` such weights as one tensor
    names: tuple[str, str] | None = None  # of the weight and the bias where not module.weight and module.bias

    @property
    def weight_name(self) -> str:
        return self.names[0] if self.names else f"{self.module}.weight"

    @property
    def bias_name(self) -> str:
        return self.names[1] if self.names else f"{self.module}.bias"

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def num_columns(self) -> int:
        return self.columns.stop - self.columns.start


class Scheme(Protocol):
    def load(
        self,
        checkpoint: Checkpoint,
        parts: Sequence[Part],
        dtype: torch.dtype,
        device: torch.device,
        float_out: bool,
    ) -> LinearKernel:
        """One linear map whose outputs are the parts' rows, one part after the other; in float32 with `float_out`."""
        ...

    def load_experts(
        self,
        checkpoint: Checkpoint,
        up: Sequence[Sequence[Part]],
        down: Sequence[Sequence[Part]],
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ExpertsKernel:
        """`up`, `down`: for each expert the parts of one linear map."""
        ...
