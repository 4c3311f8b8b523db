"""Norms. Replicated on every rank."""

from __future__ import annotations

import torch

from tgi.server.layers.source import Source


class RMSNorm:
    def __init__(self, source: Source, size: int, eps: float) -> None:
        self._weight = source.tensor("weight", (size,))
        self._eps = eps
        self._norm = source.ops.rms_norm
        self._add_norm = source.ops.add_rms_norm

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._norm(inputs, self._weight, self._eps)

    def add(self, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds `inputs` to the residual stream (float32), in place, and returns the norm of the sum."""
        return self._add_norm(inputs, residual, self._weight, self._eps)
