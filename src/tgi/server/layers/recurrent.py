"""What recurrent layers keep of each row, and the layer of selective state spaces (arXiv 2312.00752). One rank.

A row's states are kept twice. A step reads the one that ends where the step starts and writes the other, so what a step
has read counts only once a later one starts behind it (rule 3): one that failed, or whose choice was not made, leaves
no trace. Where a row goes on from between the two, what lies between is read again: ids that it came with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tgi.server.context import StepRows
from tgi.server.layers.linear import ColumnLinear, MergedColumnLinear, RowLinear
from tgi.server.layers.mlp import plain_activation
from tgi.server.layers.source import Source

SCAN = 64  # tokens whose states are in memory at once
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a step with one number of tokens, computed together."""

    tokens: torch.Tensor | slice  # of the step, row by row
    num_rows: int
    sources: torch.Tensor | None  # [rows], into the states; None: the rows begin here
    targets: torch.Tensor  # [rows]


@dataclass(frozen=True, slots=True)
class StateStep:
    ids: torch.Tensor  # [tokens], those that are read again among them
    groups: list[RowGroup]
    kept: torch.Tensor | None  # of `ids`, those that the step was asked for; None: all
    reached: npt.NDArray[np.int64]  # [3, rows]: row, side, tokens that the side will have read


class RowStates:
    """The states of all layers, by row."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """`shapes`: of one row, for each tensor that the layers keep."""
        self._shapes = shapes
        self._device = device
        self.tensors: list[torch.Tensor] = []  # [2 * rows, *shape] float32
        self._given: dict[int, npt.NDArray[np.uint32]] = {}
        self.allocate(0)

    @property
    def row_bytes(self) -> int:
        return 2 * 4 * sum(int(np.prod(shape)) for shape in self._shapes)

    def allocate(self, num_rows: int) -> None:
        """Written once, so that a machine with too little memory fails at start."""
        self.tensors.clear()
        self.tensors += [torch.empty(2 * num_rows, *shape, device=self._device).zero_() for shape in self._shapes]
        self._lens = np.full((num_rows, 2), UNKNOWN, np.int64)  # tokens that each side has read
        self._given.clear()

    def begin(self, row: int, given: npt.NDArray[np.uint32]) -> None:
        self._lens[row] = UNKNOWN
        self._given[row] = given

    def forget(self, row: int) -> None:
        self._lens[row] = UNKNOWN
        self._given.pop(row, None)

    def plan(self, rows: StepRows, ids: torch.Tensor) -> StateStep:
        sides = [self._side(row, start) for row, start, _ in rows]
        begins = [int(self._lens[row, side]) if side >= 0 else 0 for (row, _, _), side in zip(rows, sides)]
        again = [start - begin for begin, start in zip(begins, rows.starts)]
        kept = None
        if any(again):
            ids, kept = self._with_ids_again(rows, begins, again, ids)
        lens = [length + more for length, more in zip(rows.query_lens, again)]
        groups = self._groups(rows.rows, sides, lens)
        targets = [1 - side if side >= 0 else 0 for side in sides]
        ends = [begin + length for begin, length in zip(begins, lens)]
        reached = np.array([rows.rows, targets, ends], np.int64)
        self._lens[reached[0], reached[1]] = UNKNOWN  # until the step has come to its end
        return StateStep(ids, groups, kept, reached)

    def end(self, step: StateStep) -> None:
        """The step has written all it was to write."""
        rows, sides, lens = step.reached
        self._lens[rows, sides] = lens

    def _side(self, row: int, start: int) -> int:
        """The side that has read most of what comes before `start`, -1 where none has read anything."""
        usable = [(length, side) for side, length in enumerate(self._lens[row].tolist()) if 0 < length <= start]
        return max(usable, default=(0, UNKNOWN))[1]

    def _with_ids_again(
        self, rows: StepRows, begins: list[int], again: list[int], ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        position = 0
        for row, begin, more, part in zip(rows.rows, begins, again, ids.split(rows.query_lens)):
            earlier = self._given[row][begin : begin + more].astype(np.int64)
            assert len(earlier) == more, "only ids that the row came with are read again"
            parts += [self._to_device(torch.from_numpy(earlier)), part]
            position += more
            kept.append(torch.arange(position, position + len(part)))
            position += len(part)
        return torch.cat(parts), self._to_device(torch.cat(kept))

    def _groups(self, rows: list[int], sides: list[int], lens: list[int]) -> list[RowGroup]:
        """Rows with one token that go on are computed together, all others by themselves."""
        num_rows = len(self._lens)
        firsts = np.cumsum([0, *lens]).tolist()
        groups: list[RowGroup] = []
        single: list[int] = []
        for index, (row, side, length) in enumerate(zip(rows, sides, lens)):
            if length == 1 and side >= 0:
                single.append(index)
                continue
            source = None if side < 0 else self._indices([side * num_rows + row])
            target = self._indices([(1 - side if side >= 0 else 0) * num_rows + row])
            groups.append(RowGroup(slice(firsts[index], firsts[index + 1]), 1, source, target))
        if single:
            sources = self._indices([sides[index] * num_rows + rows[index] for index in single])
            targets = self._indices([(1 - sides[index]) * num_rows + rows[index] for index in single])
            tokens = slice(None) if not groups else self._indices([firsts[index] for index in single])
            groups.append(RowGroup(tokens, len(single), sources, targets))
        return groups

    def _indices(self, values: list[int]) -> torch.Tensor:
        return self._to_device(torch.tensor(values))

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._device.type == "cpu" else values.pin_memory().to(self._device, non_blocking=True)


class SelectiveStateSpace:
    """Project, convolve over the last few tokens, let the state run, gate, project."""

    def __init__(
        self,
        source: Source,
        *,
        hidden_size: int,
        inner_size: int,
        state_size: int,
        step_rank: int,
        kernel: int,
        bias: bool,
        convolution_bias: bool,
        activation: str,
        norm_eps: float | None = None,
    ) -> None:
        """`norm_eps`: of norms without weights over what steers the state: its steps, what enters it, what leaves it
        (Falcon-Mamba, arXiv 2410.05355); None for none."""
        self._rank, self._state_size, self._kernel = step_rank, state_size, kernel
        self._norm_eps = norm_eps
        self._in = MergedColumnLinear(source, "in_proj", hidden_size, [2 * inner_size], bias=bias)
        self._parameters = ColumnLinear(source, "x_proj", inner_size, step_rank + 2 * state_size)
        self._steps = ColumnLinear(source, "dt_proj", step_rank, inner_size, bias=True)
        self._out = RowLinear(source, "out_proj", inner_size, hidden_size, bias=bias)
        at = source.at("conv1d")
        self._weight = at.tensor("weight", (inner_size, 1, kernel), dtype=torch.float32)
        self._bias = at.tensor("bias", (inner_size,), dtype=torch.float32) if convolution_bias else None
        self._decay = -source.tensor("A_log", (inner_size, state_size), dtype=torch.float32).exp()
        self._skip = source.tensor("D", (inner_size,), dtype=torch.float32)
        self._activation = plain_activation(source, activation)
        self._dtype = source.dtype
        self.shapes = ((kernel - 1, inner_size), (inner_size, state_size))  # of what a row keeps

    def __call__(
        self, hidden: torch.Tensor, groups: Sequence[RowGroup], states: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]. `states`: this layer's two, of all rows."""
        inputs, gate = self._in(hidden).chunk(2, dim=-1)
        convolved = torch.empty(inputs.shape, device=inputs.device)
        for group in groups:
            convolved[group.tokens] = self._convolve(inputs[group.tokens].float(), group, states[0])
        inputs = self._activation(convolved.to(self._dtype))
        sizes = [self._rank, self._state_size, self._state_size]
        steps, entering, leaving = (self._normed(part.float()) for part in self._parameters(inputs).split(sizes, -1))
        steps = torch.nn.functional.softplus(self._steps(steps.to(self._dtype)).float())
        inputs = inputs.float()
        scanned = torch.empty_like(inputs)
        for group in groups:
            parts = [part[group.tokens] for part in (inputs, steps, entering, leaving)]
            scanned[group.tokens] = self._scan(group, states[1], *parts)
        scanned.addcmul_(inputs, self._skip).mul_(torch.nn.functional.silu(gate.float()))
        return self._out(scanned.to(self._dtype))

    def _normed(self, parameters: torch.Tensor) -> torch.Tensor:
        if self._norm_eps is None:
            return parameters
        return torch.nn.functional.rms_norm(parameters, parameters.shape[-1:], eps=self._norm_eps)

    def _convolve(self, inputs: torch.Tensor, group: RowGroup, state: torch.Tensor) -> torch.Tensor:
        """[tokens, inner] of the group -> the same"""
        inputs = inputs.unflatten(0, (group.num_rows, -1))
        before = state.new_zeros(group.num_rows, *state.shape[1:])
        if group.sources is not None:
            before = state.index_select(0, group.sources)
        window = torch.cat([before, inputs], 1)  # [rows, kernel - 1 + tokens, inner]
        state.index_copy_(0, group.targets, window[:, window.shape[1] - self._kernel + 1 :])
        convolved = torch.nn.functional.conv1d(
            window.transpose(1, 2), self._weight, self._bias, groups=self._weight.shape[0]
        )
        return convolved.transpose(1, 2).flatten(0, 1)

    def _scan(
        self,
        group: RowGroup,
        states: torch.Tensor,
        inputs: torch.Tensor,  # [tokens, inner] of the group
        steps: torch.Tensor,  # [tokens, inner]
        entering: torch.Tensor,  # [tokens, state]
        leaving: torch.Tensor,  # [tokens, state]
    ) -> torch.Tensor:
        """[tokens, inner]"""
        inputs, steps, entering, leaving = (
            part.unflatten(0, (group.num_rows, -1)) for part in (inputs, steps, entering, leaving)
        )
        state = states.new_zeros(group.num_rows, *states.shape[1:])
        if group.sources is not None:
            state = states.index_select(0, group.sources)
        found: list[torch.Tensor] = []
        for begin in range(0, inputs.shape[1], SCAN):
            part = slice(begin, begin + SCAN)
            step = steps[:, part].unsqueeze(-1)  # [rows, tokens, inner, 1]
            decay = (step * self._decay).exp()  # [rows, tokens, inner, state]
            run = step * entering[:, part].unsqueeze(2) * inputs[:, part].unsqueeze(-1)
            state = (_one_by_one if run.device.type == "cpu" else _doubling)(run, decay, state)
            found.append(torch.matmul(run, leaving[:, part].unsqueeze(-1)).squeeze(-1))
        states.index_copy_(0, group.targets, state)
        return torch.cat(found, 1).flatten(0, 1)


def _one_by_one(run: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """run, decay [rows, tokens, inner, state]: run[t] += decay[t] * run[t - 1], in place, where `state` [rows, inner,
    state] comes before the first. Returns the last."""
    for token in range(run.shape[1]):
        state = run[:, token].addcmul_(decay[:, token], state)
    return state


def _doubling(run: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The same in few operations of more work each, for a device that waits for their launches: each turn joins two
    stretches that are done. `decay` is changed."""
    run[:, 0].addcmul_(decay[:, 0], state)
    stretch = 1
    while stretch < run.shape[1]:
        run[:, stretch:] += decay[:, stretch:] * run[:, :-stretch]
        decay[:, stretch:] = decay[:, stretch:] * decay[:, :-stretch]
        stretch *= 2
    return run[:, -1]
