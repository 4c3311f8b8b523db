"""Products with a weight: the form a weight is kept in, and the torch reference.

A weight has one form at every batch size, so that no answer depends on how many rows share a step.
"""

from __future__ import annotations

from typing import Protocol

import torch


class LinearKernel(Protocol):
    """[..., in] -> [..., out], in the weight's dtype. `kept` is every tensor it holds on to."""

    kept: tuple[torch.Tensor, ...]

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """The weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.kept = (weight,) if bias is None else (weight, bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, self._weight, self._bias)


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    """weight [out, in], bias [out]. May reorder the weight into a copy; then the caller's own can go."""
    return DenseLinear(weight, bias)
