"""Products with a weight: the form a weight is kept in, and the torch reference.

A weight has one form at every batch size, so that no answer depends on how many rows share a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class LinearKernel(Protocol):
    """[..., in] -> [..., out]."""

    @property
    def kept(self) -> Sequence[torch.Tensor]:
        """All that it holds on to."""
        ...

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """The weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, float_out: bool) -> None:
        self._weight = weight
        self._bias = bias
        self._float_out = float_out
        self.kept: Sequence[torch.Tensor] = (weight,) if bias is None else (weight, bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = torch.nn.functional.linear(inputs, self._weight, self._bias)
        return outputs.float() if self._float_out else outputs


def linear(weight: torch.Tensor, bias: torch.Tensor | None, float_out: bool = False) -> LinearKernel:
    """weight [out, in], bias [out]. Outputs have the weight's dtype, or float32 with `float_out`.

    A kernel may reorder the weight into a copy; then the caller's own can go.
    """
    return DenseLinear(weight, bias, float_out)
