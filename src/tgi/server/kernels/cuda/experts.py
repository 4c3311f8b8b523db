"""Experts as two stacks of weights. The host never learns who chose whom, so that nobody waits for the device.

    grouped   pairs (token, choice) lie in order of their experts, each expert takes its stretch of them: what nobody
              chose is not read. For bfloat16, on devices that have grouped products
    every     every expert takes all tokens; those that did not choose it count for nothing
    copied    each pair takes a copy of its expert's weights

`python -m benchmarks.gpu_experts` measures them; docs/performance.md has what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]
Dense = tuple[torch.Tensor, torch.Tensor | None]
ALIGNMENT = 16  # of a row, in bytes; grouped products ask for it
COPY_COST = 8  # of a weight, against reading it where it is
# Below these, reading the weights is what every expert costs, and nearly all are read anyway.
FEW_TOKENS = 64
FEW_EXPERTS = 4  # for each that a token chooses
BYTES_AT_A_TIME = 128 << 20  # of copied weights, and of what tokens become within every expert


class _Stack:
    """Linear maps of one shape: weight [experts, out, in], bias [experts, out]."""

    def __init__(self, num_experts: int, parts: Iterable[Dense]) -> None:
        for expert, (weight, bias) in enumerate(parts):
            if expert == 0:
                self.weight = weight.new_empty(num_experts, *weight.shape)
                self.bias = None if bias is None else bias.new_empty(num_experts, *bias.shape)
            self.weight[expert] = weight
            if self.bias is not None:
                assert bias is not None
                self.bias[expert] = bias
        self.kept = [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def is_aligned(self) -> bool:
        return all(size * self.weight.element_size() % ALIGNMENT == 0 for size in self.weight.shape[1:])

    def copied(self, inputs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """inputs [pairs, in], experts [pairs] -> [pairs, out]"""
        outputs = torch.bmm(self.weight.index_select(0, experts), inputs.unsqueeze(-1)).squeeze(-1)
        return outputs if self.bias is None else outputs + self.bias.index_select(0, experts)

    def grouped(self, inputs: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The same of pairs in order of their experts; ends [experts] int32: where each expert's stretch ends."""
        outputs = torch.nn.functional.grouped_mm(inputs, self.weight.transpose(1, 2), offs=ends)
        return outputs if self.bias is None else outputs + self.bias.index_select(0, experts)

    def every(self, inputs: torch.Tensor, part: slice) -> torch.Tensor:
        """[tokens, in] or [experts of the part, tokens, in] -> [experts of the part, tokens, out]"""
        outputs = torch.matmul(inputs, self.weight[part].transpose(1, 2))
        return outputs if self.bias is None else outputs + self.bias[part].unsqueeze(1)


class StackedExperts:
    """As `ops.moe.ExpertsKernel`."""

    def __init__(self, up: _Stack, down: _Stack, activation: Activation, is_grouped: bool) -> None:
        self._up, self._down, self._activation = up, down, activation
        self.kept = up.kept + down.kept
        self.is_grouped = is_grouped and all(
            stack.weight.dtype == torch.bfloat16 and stack.is_aligned for stack in (up, down)
        )
        self._num_experts = len(up.weight)
        expert_bytes = max(stack.weight[0].numel() * stack.weight.element_size() for stack in (up, down))
        self._pairs_at_a_time = max(1, BYTES_AT_A_TIME // expert_bytes)
        self._widest = max(up.weight.shape[1], down.weight.shape[1])

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.is_grouped and not self._is_dense(*ids.shape):
            return self.grouped(hidden, ids, weights)
        if COPY_COST * ids.numel() <= self._num_experts:
            return self.copied(hidden, ids, weights)
        return self.every(hidden, ids, weights)

    def _is_dense(self, num_tokens: int, top_k: int) -> bool:
        return (
            num_tokens <= FEW_TOKENS
            and self._num_experts <= FEW_EXPERTS * top_k
            and self._num_experts <= num_tokens * top_k
        )

    def grouped(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ids, places = ids.sort(-1)
        chosen, order = ids.flatten().sort(stable=True)
        counts = torch.zeros(self._num_experts, dtype=torch.int32, device=ids.device)
        counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = self._activation(self._up.grouped(hidden.index_select(0, order // ids.shape[1]), chosen, ends))
        outputs = self._down.grouped(inner, chosen, ends)
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs)
        return _mixed(by_token, weights.gather(-1, places))

    def every(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        shares = weights.new_zeros(len(hidden), self._num_experts).scatter_(1, ids, weights).t().unsqueeze(-1)
        # What an expert makes of tokens that did not choose it may be no number.
        others = torch.ones(len(hidden), self._num_experts, dtype=torch.bool, device=ids.device)
        others = others.scatter_(1, ids, False).t().unsqueeze(-1)
        total = hidden.new_zeros(hidden.shape, dtype=torch.float32)
        at_a_time = max(1, BYTES_AT_A_TIME // (len(hidden) * self._widest * total.element_size()))
        for begin in range(0, self._num_experts, at_a_time):
            part = slice(begin, begin + at_a_time)
            outputs = self._down.every(self._activation(self._up.every(hidden, part)), part).float()
            total += outputs.mul_(shares[part]).masked_fill_(others[part], 0.0).sum(0)
        return total.to(hidden.dtype)

    def copied(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ids, places = ids.sort(-1)
        inputs = hidden.repeat_interleave(ids.shape[1], 0)
        pairs = zip(inputs.split(self._pairs_at_a_time), ids.flatten().split(self._pairs_at_a_time), strict=True)
        outputs = [self._down.copied(self._activation(self._up.copied(part, chosen)), chosen) for part, chosen in pairs]
        return _mixed(torch.cat(outputs), weights.gather(-1, places))


def stacked_experts(
    num_experts: int, up: Iterable[Dense], down: Iterable[Dense], activation: Activation, linear: object
) -> StackedExperts:
    """As `ops.moe.experts`."""
    del linear
    return StackedExperts(_Stack(num_experts, up), _Stack(num_experts, down), activation, is_grouped=False)


def grouped_experts(
    num_experts: int, up: Iterable[Dense], down: Iterable[Dense], activation: Activation, linear: object
) -> StackedExperts:
    """As `ops.moe.experts`, of a device that has grouped products."""
    del linear
    return StackedExperts(_Stack(num_experts, up), _Stack(num_experts, down), activation, is_grouped=True)


def _mixed(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outputs [tokens * k, hidden], weights [tokens, k] -> [tokens, hidden]"""
    by_token = outputs.unflatten(0, weights.shape).float()
    return by_token.mul_(weights.unsqueeze(-1)).sum(1).to(outputs.dtype)
