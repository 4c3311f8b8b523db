"""Rotary position embedding: signature and torch reference."""

from __future__ import annotations

import torch


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates, in place, the pairs (i, i + r / 2) of the first r dimensions of every head; returns `heads`.

    heads [tokens, heads, head_dim], any strides with a dense last dimension; cos, sin [tokens, r / 2] float32, r at
    most head_dim. Computed in float32, rounded once.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first = heads[..., :half].float()
    second = heads[..., half : 2 * half].float()
    # Both before either is stored: in float32 they are views of what is written.
    turned = first * cos - second * sin, second * cos + first * sin
    heads[..., :half], heads[..., half : 2 * half] = turned
    return heads
