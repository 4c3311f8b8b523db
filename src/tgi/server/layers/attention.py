"""Self-attention of one layer: project, norm, rotate, ask the step's backend, project. And alibi's slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tgi.server.context import AttentionOption, CacheShape, ForwardContext
from tgi.server.layers.linear import HeadShare, QKVLinear, RowLinear
from tgi.server.layers.rotary import Rotation
from tgi.server.layers.source import Source

HeadNorm = Callable[[torch.Tensor], torch.Tensor]  # [tokens, heads, head_dim] -> the same


class Attention:
    """A family sets what it has after construction: `query_norm` and `key_norm` (before the rotation), since they are
    made from `share`; all else are options of the constructor."""

    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None

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
        qkv: str = "qkv_proj",
        out: str = "o_proj",
        transposed: bool = False,
        grouped: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: str | None = None,
        alibi: torch.Tensor | None = None,
        clip: float | None = None,
    ) -> None:
        """`qkv`, `out`: what the checkpoint calls the projections; `transposed`, `grouped`: how it keeps them
        (QKVLinear). `scale`: of the scores, head_dim ** -0.5 if not given. `window`: tokens seen to the left, the own
        one included. `softcap`: bounds the scores. `sinks`: the tensor with one more score per head. `alibi` [heads]:
        slopes of all heads. `clip`: bounds queries, keys and values."""
        self._layer = layer
        self._head_dim = head_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        self._window = window
        self._softcap = softcap
        self._clip = clip
        self._qkv = QKVLinear(
            source, qkv, hidden_size, heads, kv_heads, head_dim, bias=bias, transposed=transposed, grouped=grouped
        )
        self._out = RowLinear(source, out, heads * head_dim, hidden_size, bias=output_bias, transposed=transposed)
        self._rotate_ = source.ops.rotate_
        self.share: HeadShare = self._qkv.share
        self.num_heads = self.share.num_heads  # of this rank
        self.num_kv_heads = self.share.num_kv_heads
        own = self.share.query
        self._sinks = None if sinks is None else source.tensor(sinks, (heads,), (own,), dtype=torch.float32)
        self._alibi = None if alibi is None else alibi[own].to(device=source.device, dtype=torch.float32)

    @property
    def options(self) -> frozenset[AttentionOption]:
        """What a backend must have for this layer."""
        asked: dict[AttentionOption, object] = {
            "window": self._window,
            "softcap": self._softcap,
            "sinks": self._sinks,
            "alibi": self._alibi,
        }
        return frozenset(name for name, value in asked.items() if value is not None)

    @property
    def head_dim(self) -> int:
        return self._head_dim

    @property
    def value_dim(self) -> int:
        return self._head_dim

    def __call__(self, hidden: torch.Tensor, rotation: Rotation | None, context: ForwardContext) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]. Without a rotation positions are not told."""
        tokens = hidden.shape[0]
        projected = self._qkv(hidden)
        if self._clip is not None:
            projected = projected.clamp_(-self._clip, self._clip)
        # Query and key heads lie side by side: one rotation turns both.
        heads = projected.view(tokens, -1, self._head_dim)
        turned = self.num_heads + self.num_kv_heads
        if self.query_norm is not None:
            heads[:, : self.num_heads] = self.query_norm(heads[:, : self.num_heads])
        if self.key_norm is not None:
            heads[:, self.num_heads : turned] = self.key_norm(heads[:, self.num_heads : turned])
        if rotation is not None:
            self._rotate_(heads[:, :turned], rotation.cos, rotation.sin, rotation.interleaved)
        attended = context.attention(
            self._layer,
            heads[:, : self.num_heads],
            heads[:, self.num_heads : turned],
            heads[:, turned:],
            self._scale,
            window=self._window,
            softcap=self._softcap,
            sinks=self._sinks,
            alibi=self._alibi,
        )
        return self._out(attended.reshape(tokens, -1))


class Cached(Protocol):
    """What a layer keeps of each token, on this rank."""

    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    @property
    def options(self) -> frozenset[AttentionOption]: ...


def cache_shape(layers: Sequence[Cached]) -> CacheShape:
    """What the attention layers of a model need together. They differ in options alone."""
    first = layers[0]
    options = frozenset[AttentionOption]().union(*(layer.options for layer in layers))
    return CacheShape(len(layers), first.num_kv_heads, first.num_heads, first.head_dim, first.value_dim, options)


def alibi_slopes(heads: int, max_bias: float = 8.0) -> torch.Tensor:
    """[heads] float32: slopes of attention with linear biases (arXiv 2108.12409). Where `heads` is no power of two,
    those of the next smaller power come first, then every other one of the next larger."""
    power = 1 << (heads.bit_length() - 1)  # largest that is not above
    slopes = [2.0 ** (-max_bias * (index + 1) / power) for index in range(power)]
    slopes += [2.0 ** (-max_bias * (2 * index + 1) / (2 * power)) for index in range(heads - power)]
    return torch.tensor(slopes)
