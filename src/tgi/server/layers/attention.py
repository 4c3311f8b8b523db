"""Self-attention of one layer: project, rotate, ask the step's backend, project."""

from __future__ import annotations

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.linear import QKVLinear, RowLinear
from tgi.server.layers.rotary import Rotation
from tgi.server.layers.source import Source


class Attention:
    def __init__(
        self,
        source: Source,
        layer: int,
        *,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,  # tokens seen to the left, the own one included
    ) -> None:
        self._layer = layer
        self._head_dim = head_dim
        self._scale = head_dim**-0.5
        self._window = window
        self._qkv = QKVLinear(source, "qkv_proj", hidden_size, heads, kv_heads, head_dim, bias=bias)
        self._out = RowLinear(source, "o_proj", heads * head_dim, hidden_size, bias=output_bias)
        self._rotate_ = source.ops.rotate_
        self.num_heads = self._qkv.num_heads  # of this rank
        self.num_kv_heads = self._qkv.num_kv_heads

    def __call__(self, hidden: torch.Tensor, rotation: Rotation, context: ForwardContext) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        tokens = hidden.shape[0]
        # Query and key heads lie side by side: one rotation turns both.
        heads = self._qkv(hidden).view(tokens, -1, self._head_dim)
        turned = self.num_heads + self.num_kv_heads
        self._rotate_(heads[:, :turned], rotation.cos, rotation.sin)
        attended = context.attention(
            self._layer,
            heads[:, : self.num_heads],
            heads[:, self.num_heads : turned],
            heads[:, turned:],
            self._scale,
            window=self._window,
        )
        return self._out(attended.reshape(tokens, -1))
