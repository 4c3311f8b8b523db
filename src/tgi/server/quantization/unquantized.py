"""Weights in the model's own dtype: one matrix, kept as the platform's product wants it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgi.server.ops.dispatch import Ops
from tgi.server.ops.matmul import LinearKernel
from tgi.server.quantization.scheme import Part
from tgi.server.weights.checkpoint import Checkpoint
from tgi.server.weights.loader import load_into


class Unquantized:
    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def load(
        self,
        checkpoint: Checkpoint,
        parts: Sequence[Part],
        dtype: torch.dtype,
        device: torch.device,
        float_out: bool,
    ) -> LinearKernel:
        sizes = [part.num_rows for part in parts]
        weight = torch.empty(sum(sizes), parts[0].num_columns, dtype=dtype, device=device)
        for part, rows in zip(parts, weight.split(sizes), strict=True):
            load_into(rows, checkpoint, f"{part.module}.weight", part.shape, (part.rows, part.columns))
        bias = None
        if any(part.bias for part in parts):
            bias = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for part, rows in zip(parts, bias.split(sizes), strict=True):
                if part.bias:
                    load_into(rows, checkpoint, f"{part.module}.bias", part.shape[:1], (part.rows,))
        return self._ops.linear(weight, bias, float_out)
