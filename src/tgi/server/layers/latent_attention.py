"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one narrow latent
vector per token, and a part of the key, shared by the heads too, carries the position.

The cache keeps the latent, not what it expands to: kv_rank + rotary_dim elements for the key and kv_rank for the value,
whatever the number of heads (1,088 against 5,120 in DeepSeek-V2-Lite, 40,960 in V3). A head's expansion is a linear
map, so its key half goes to the query and its value half behind the sum:

        score = q · (K c) = (Kᵀ q) · c         output = Σ w (V c) = V (Σ w c)

and a step is attention of all heads over a single key-value head, which any backend has. Every rank keeps the latents
of all tokens; the heads are split.
"""

from __future__ import annotations

import torch

from tgi.server.context import AttentionOption, ForwardContext
from tgi.server.layers.linear import ColumnLinear, MergedColumnLinear, RowLinear
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.rotary import Rotation
from tgi.server.layers.source import Source

NORM_EPS = 1e-6  # of the norms of latents, whatever the model's other norms have
PACKED = {"qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}


class LatentAttention:
    def __init__(
        self,
        source: Source,
        layer: int,
        *,
        hidden_size: int,
        heads: int,
        query_rank: int | None,
        kv_rank: int,
        plain_dim: int,
        rotary_dim: int,
        value_dim: int,
        scale: float,
        bias: bool = False,
    ) -> None:
        """`query_rank`: of the queries' own latent; None where they are projected at once. `plain_dim`, `rotary_dim`:
        the elements of a head's query and key without and with position. `value_dim`: of a head's value. `scale`: of
        the scores. `bias`: of the projections to latents and of the last one."""
        self._layer = layer
        self._scale = scale
        self._sizes = (plain_dim, rotary_dim)
        self._kv_rank = kv_rank
        sizes = (heads * (plain_dim + rotary_dim), kv_rank + rotary_dim)
        if query_rank is None:
            self._project = _Projections(source, hidden_size, sizes, bias)
        else:
            self._project = _LowRankProjections(source, hidden_size, sizes, bias, query_rank)
        self._kv_norm = RMSNorm(source.at("kv_a_layernorm"), kv_rank, NORM_EPS)
        own = source.share(heads, "attention heads")
        expanded = plain_dim + value_dim
        rows = slice(own.start * expanded, own.stop * expanded)
        weight = source.tensor("kv_b_proj.weight", (heads * expanded, kv_rank), (rows,)).view(-1, expanded, kv_rank)
        self._expand_key = weight[:, :plain_dim]  # [heads, plain_dim, kv_rank]
        self._expand_value = weight[:, plain_dim:].transpose(1, 2)  # [heads, kv_rank, value_dim]
        self._out = RowLinear(source, "o_proj", heads * value_dim, hidden_size, bias=bias)
        self._rotate_ = source.ops.rotate_
        self.num_heads = own.stop - own.start  # of this rank
        self.num_kv_heads = 1

    @property
    def options(self) -> frozenset[AttentionOption]:
        """What a backend must have for this layer."""
        return frozenset({"value_dim"})

    @property
    def head_dim(self) -> int:
        """Of what is cached as a key: the latent and the rotated part."""
        return self._kv_rank + self._sizes[1]

    @property
    def value_dim(self) -> int:
        """Of what is cached as a value."""
        return self._kv_rank

    def __call__(self, hidden: torch.Tensor, rotation: Rotation | None, context: ForwardContext) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        assert rotation is not None
        tokens = hidden.shape[0]
        queries, latents = self._project(hidden)
        plain, turned = queries.view(tokens, self.num_heads, -1).split(self._sizes, -1)
        latent, shared = latents.split((self._kv_rank, self._sizes[1]), -1)
        self._rotate_(turned, rotation.cos, rotation.sin, rotation.interleaved)
        self._rotate_(shared.unsqueeze(1), rotation.cos, rotation.sin, rotation.interleaved)
        latent = self._kv_norm(latent)
        absorbed = torch.bmm(plain.transpose(0, 1), self._expand_key).transpose(0, 1)  # [tokens, heads, kv_rank]
        attended = context.attention(
            self._layer,
            torch.cat((absorbed, turned), -1),
            torch.cat((latent, shared), -1).unsqueeze(1),
            latent.unsqueeze(1),
            self._scale,
        )
        outputs = torch.bmm(attended.transpose(0, 1), self._expand_value).transpose(0, 1)
        return self._out(outputs.reshape(tokens, -1))


class _Projections:
    """Hidden states -> queries of this rank's heads, and what the cache's latents are made from."""

    def __init__(self, source: Source, hidden_size: int, sizes: tuple[int, int], bias: bool) -> None:
        """`sizes`: output features of all heads' queries, and of the latents; whole on every rank."""
        queries, latents = sizes
        self._queries = ColumnLinear(source, "q_proj", hidden_size, queries)
        self._latents = MergedColumnLinear(
            source, "kv_a_proj_with_mqa", hidden_size, [latents], bias=bias, rows=[slice(0, latents)]
        )

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._queries(hidden), self._latents(hidden)


class _LowRankProjections:
    """The same where queries come from a latent of their own, of `rank` elements."""

    def __init__(self, source: Source, hidden_size: int, sizes: tuple[int, int], bias: bool, rank: int) -> None:
        queries, latents = sizes
        self._sizes = [rank, latents]
        self._down = MergedColumnLinear(
            source, "qkv_a_proj", hidden_size, self._sizes, bias=bias, rows=[slice(0, rank), slice(0, latents)]
        )
        self._norm = RMSNorm(source.at("q_a_layernorm"), rank, NORM_EPS)
        self._queries = ColumnLinear(source, "q_b_proj", rank, queries)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, latents = self._down(hidden).split(self._sizes, -1)
        return self._queries(self._norm(low)), latents
