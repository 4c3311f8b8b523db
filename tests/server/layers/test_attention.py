"""Attention's options as they reach the backend, and alibi's slopes."""

from __future__ import annotations

import torch

from tests.server.layers.test_parallel import HIDDEN, INPUTS, QKV, random, source_of
from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention, alibi_slopes, cache_shape

TENSORS = {**QKV, "attn.o_proj.weight": random(HIDDEN, 32, seed=5), "attn.sinks": random(4, seed=6)}


class Asked:
    """Notes what it is asked, and answers with the values of the first heads."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.layer, self.query, self.key, self.value, self.scale = layer, query, key, value, scale
        self.window, self.softcap, self.sinks, self.alibi = window, softcap, sinks, alibi
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


def attention(rank: int = 0, world_size: int = 1, **options: object) -> Attention:
    return Attention(
        source_of(TENSORS, rank, world_size).at("attn"),
        3,
        hidden_size=HIDDEN,
        heads=4,
        kv_heads=2,
        head_dim=8,
        **options,  # type: ignore[arg-type]
    )


def test_options_reach_the_backend_for_this_ranks_heads() -> None:
    slopes = alibi_slopes(4)
    for rank in range(2):
        layer = attention(rank, 2, scale=0.5, window=7, softcap=3.0, sinks="sinks", alibi=slopes, clip=0.125)
        asked = Asked()
        layer(INPUTS, None, ForwardContext(asked))
        own = slice(2 * rank, 2 * rank + 2)
        assert asked.scale == 0.5
        assert (asked.layer, asked.window, asked.softcap) == (3, 7, 3.0)
        assert asked.sinks is not None
        assert torch.equal(asked.sinks, TENSORS["attn.sinks"][own])
        assert asked.alibi is not None
        assert torch.equal(asked.alibi, slopes[own])
        assert float(asked.query.abs().max()) <= 0.125
        assert float(asked.value.abs().max()) <= 0.125
        assert layer.options == {"window", "softcap", "sinks", "alibi"}


def test_plain_attention_asks_for_nothing() -> None:
    layer = attention()
    assert layer.options == frozenset()
    asked = Asked()
    layer(INPUTS, None, ForwardContext(asked))
    assert asked.scale == 8**-0.5
    assert (asked.window, asked.softcap, asked.sinks, asked.alibi) == (None, None, None, None)


def test_a_models_shape_is_what_its_layers_need_together() -> None:
    shape = cache_shape([attention(), attention(window=4), attention(softcap=2.0)])
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim) == (3, 4, 2, 8, 8)
    assert shape.options == {"window", "softcap"}


def test_norms_of_queries_and_keys_leave_values_alone() -> None:
    layer = attention()
    asked = Asked()
    layer(INPUTS, None, ForwardContext(asked))
    value = asked.value.clone()
    layer.query_norm = torch.zeros_like
    layer.key_norm = torch.ones_like
    layer(INPUTS, None, ForwardContext(asked))
    assert not asked.query.any()
    assert bool((asked.key == 1).all())
    assert torch.equal(asked.value, value)


def test_slopes_of_a_power_of_two_and_of_what_is_between() -> None:
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-power for power in range(1, 9)]))
    torch.testing.assert_close(alibi_slopes(4), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
    torch.testing.assert_close(alibi_slopes(6), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]))
