"""Weights in the model's own dtype: one matrix, kept as the platform's product wants it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tgi.server.ops.dispatch import Ops
from tgi.server.ops.matmul import LinearKernel
from tgi.server.ops.moe import Activation, Dense, ExpertsKernel
from tgi.server.quantization.scheme import Part
from tgi.server.weights.checkpoint import Checkpoint
from tgi.server.weights.loader import check_shape_of, load_into
from tgi.server.weights.region import Region


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
        return self._ops.linear(*_dense(checkpoint, parts, dtype, device), float_out)

    def load_experts(
        self,
        checkpoint: Checkpoint,
        up: Sequence[Sequence[Part]],
        down: Sequence[Sequence[Part]],
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ExpertsKernel:
        def each(experts: Sequence[Sequence[Part]]) -> Iterator[Dense]:
            return (_dense(checkpoint, parts, dtype, device) for parts in experts)

        return self._ops.experts(len(up), each(up), each(down), activation, self._ops.linear)


def _dense(checkpoint: Checkpoint, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Dense:
    sizes = [part.num_rows for part in parts]
    for part in parts:
        shape = part.shape[::-1] if part.transposed else part.shape
        check_shape_of(checkpoint, part.weight_name, shape if part.stack is None else (part.stack[1], *shape))
    weight = torch.empty(sum(sizes), parts[0].num_columns, dtype=dtype, device=device)
    for part, rows in zip(parts, weight.split(sizes), strict=True):
        _load_weight(rows, checkpoint, part)
    bias = None
    if any(part.bias for part in parts):
        bias = torch.zeros(sum(sizes), dtype=dtype, device=device)
        for part, rows in zip(parts, bias.split(sizes), strict=True):
            if part.bias:
                _load_stacked(rows, checkpoint, part.bias_name, part.shape[:1], (part.rows,), part.stack)
    return weight, bias


def _load_weight(rows: torch.Tensor, checkpoint: Checkpoint, part: Part) -> None:
    shape, region = part.shape, (part.rows, part.columns)
    if part.transposed:
        rows, shape, region = rows.t(), shape[::-1], region[::-1]
    _load_stacked(rows, checkpoint, part.weight_name, shape, region, part.stack)


def _load_stacked(
    target: torch.Tensor,
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    region: Region,
    stack: tuple[int, int] | None,
) -> None:
    if stack is not None:
        index, count = stack
        target, shape, region = target.unsqueeze(0), (count, *shape), (slice(index, index + 1), *region)
    load_into(target, checkpoint, name, shape, region)
