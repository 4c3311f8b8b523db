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
        if self._float_out and inputs.device.type == "cuda" and inputs.dtype != torch.float32:
            return self._unrounded(inputs)
        outputs = torch.nn.functional.linear(inputs, self._weight, self._bias)
        return outputs.float() if self._float_out else outputs

    def _unrounded(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product sums in float32 anyway: a router's close choices need what rounding would lose."""
        outputs = torch.mm(inputs.flatten(0, -2), self._weight.t(), out_dtype=torch.float32)
        if self._bias is not None:
            outputs += self._bias
        return outputs.view(*inputs.shape[:-1], -1)


def linear(weight: torch.Tensor, bias: torch.Tensor | None, float_out: bool = False) -> LinearKernel:
    """weight [out, in], bias [out]. Outputs have the weight's dtype, or float32 with `float_out`.

    A kernel may reorder the weight into a copy; then the caller's own can go.
    """
    return DenseLinear(weight, bias, float_out)
