"""Norms: signatures and torch references. Statistics in float32 whatever the dtype.

The residual stream is float32 in every format of the weights: it is the sum of all layers, and rounding it after each
of them turns close choices (one of the bundled model's first answers among them) for no gain in speed.
"""

from __future__ import annotations

import torch


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """[..., n] of the weight's dtype or float32, [n] -> [..., n] of the weight's dtype, as a new tensor:
    inputs / sqrt(mean(inputs²) + eps) * (weight + offset), the sum in float32 too."""
    values = inputs.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * (weight.float() + offset)).to(weight.dtype)


def add_rms_norm(
    inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Adds `inputs` to `residual` (float32) in place and returns the norm of the sum. [..., n] each."""
    return rms_norm(residual.add_(inputs), weight, eps, offset)


def layer_norm(
    inputs: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """[..., n] of any float dtype -> [..., n] of `dtype`, as a new tensor:
    (inputs - mean) / sqrt(variance + eps) * weight + bias. weight, bias [n] float32 or absent."""
    return torch.nn.functional.layer_norm(inputs.float(), inputs.shape[-1:], weight, bias, eps).to(dtype)
