"""Rotary position embedding: signature and torch reference."""

from __future__ import annotations

import torch


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotates, in place, pairs of the first r dimensions of every head: (i, i + r / 2), or (2i, 2i + 1) where they are
    interleaved. Returns `heads`.

    heads [tokens, heads, head_dim], any strides with a dense last dimension; cos, sin [tokens, r / 2] float32, r at
    most head_dim. Computed in float32, rounded once.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    a, b = first.float(), second.float()
    # Both before either is stored: in float32 they are views of what is written.
    turned = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned[0])
    second.copy_(turned[1])
    return heads
