"""Root-mean-square norm: signatures and torch references. Statistics in float32 whatever the dtype."""

from __future__ import annotations

import torch


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., n], [n] -> [..., n]: inputs / sqrt(mean(inputs²) + eps) * weight, as a new tensor."""
    values = inputs.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(inputs.dtype)


def add_rms_norm(inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `inputs` to `residual` in place and returns the norm of the sum. [..., n] each."""
    return rms_norm(residual.add_(inputs), weight, eps)
