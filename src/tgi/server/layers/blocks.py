"""The two usual shapes of a decoder layer: attention and MLP one after the other, or beside each other.

        sequential: x += attention(norm(x)); x += mlp(norm(x))     parallel: x += attention(norm(x)) + mlp(norm(x))

A family whose layers differ by more writes its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention
from tgi.server.layers.decoder import FULL, Rotations, entered
from tgi.server.layers.latent_attention import LatentAttention
from tgi.server.layers.norm import Norm

FeedForward = Callable[[torch.Tensor], torch.Tensor]  # [tokens, hidden] -> the same, a tensor of the caller's own


class SequentialLayer:
    def __init__(
        self,
        *,
        norm: Norm,
        attention: Attention | LatentAttention,
        mlp_norm: Norm,
        mlp: FeedForward,
        normed_stream: bool = False,
    ) -> None:
        """`normed_stream`: what a norm returns is the stream from there on, x = norm(x); x += attention(x); and so
        for the MLP."""
        self.attention = attention
        self._norm = norm
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._normed_stream = normed_stream

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotations: Rotations, context: ForwardContext
    ) -> torch.Tensor:
        hidden = entered(self._norm, update, residual)
        if self._normed_stream:
            residual.copy_(hidden)
        hidden = self._mlp_norm.add(self.attention(hidden, rotations.get(FULL), context), residual)
        if self._normed_stream:
            residual.copy_(hidden)
        return self._mlp(hidden)


class ParallelLayer:
    def __init__(self, *, norm: Norm, attention: Attention, mlp: FeedForward, mlp_norm: Norm | None = None) -> None:
        """`mlp_norm`: the MLP's own; it reads what attention reads if not given."""
        self.attention = attention
        self._norm = norm
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotations: Rotations, context: ForwardContext
    ) -> torch.Tensor:
        hidden = entered(self._norm, update, residual)
        attended = self.attention(hidden, rotations.get(FULL), context)
        return attended.add_(self._mlp(hidden if self._mlp_norm is None else self._mlp_norm(residual)))
