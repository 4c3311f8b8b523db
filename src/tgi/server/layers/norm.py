"""Norms. Replicated on every rank, but for those over this rank's heads.

`add` is the residual stream's: it joins the last layer's sum to the next norm, one pass over memory instead of two.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tgi.server.layers.source import Source


class Norm(Protocol):
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., size] of the model's dtype or float32 -> [..., size] of the model's dtype."""
        ...

    def add(self, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds `inputs` to the residual stream (float32), in place, and returns the norm of the sum."""
        ...


class RMSNorm:
    def __init__(self, source: Source, size: int, eps: float, offset: float = 0.0) -> None:
        """`offset` is added to the weight (Gemma keeps it as a difference from one)."""
        self._weight = source.tensor("weight", (size,))
        self._eps = eps
        self._offset = offset
        self._norm = source.ops.rms_norm
        self._add_norm = source.ops.add_rms_norm

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._norm(inputs, self._weight, self._eps, self._offset)

    def add(self, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._add_norm(inputs, residual, self._weight, self._eps, self._offset)


class LayerNorm:
    def __init__(self, source: Source, size: int, eps: float, *, weight: bool = True, bias: bool = True) -> None:
        """Some families have no bias, some (OLMo) neither."""
        self._weight = source.tensor("weight", (size,), dtype=torch.float32) if weight else None
        self._bias = source.tensor("bias", (size,), dtype=torch.float32) if bias else None
        self._eps = eps
        self._dtype = source.dtype
        self._norm = source.ops.layer_norm

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._norm(inputs, self._weight, self._bias, self._eps, self._dtype)

    def add(self, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(residual.add_(inputs))


class NoNorm:
    """Stands where others have a norm."""

    def __init__(self, source: Source) -> None:
        self._dtype = source.dtype

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self._dtype)

    def add(self, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(inputs).to(self._dtype)


class HeadLayerNorm:
    """A LayerNorm without bias over each head, every head with a weight of its own."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight [heads of this rank, head_dim] float32"""
        self._weight = weight
        self._eps = eps

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> the same"""
        normed = torch.nn.functional.layer_norm(heads.float(), heads.shape[-1:], eps=self._eps)
        return normed.mul_(self._weight).to(heads.dtype)


class WholeRMSNorm:
    """One RMSNorm over all heads of a token together, those on other ranks included."""

    def __init__(self, source: Source, heads: int, own: slice, head_dim: int, eps: float, copies: int = 1) -> None:
        """`own`: the heads of this rank. `copies`: ranks that hold the same heads."""
        size = heads * head_dim
        self._weight = source.tensor("weight", (size,), (slice(own.start * head_dim, own.stop * head_dim),))
        self._size = size * copies
        self._eps = eps
        self._norm = source.ops.rms_norm
        self._group = source.group if source.group.world_size > 1 else None

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> the same"""
        flat = heads.flatten(1)
        if self._group is None:
            return self._norm(flat, self._weight, self._eps, 0.0).view(heads.shape)
        values = flat.float()
        squares = self._group.all_reduce_(values.square().sum(-1, keepdim=True))
        normed = values * torch.rsqrt(squares / self._size + self._eps) * self._weight.float()
        return normed.to(heads.dtype).view(heads.shape)
