"""OPT and Galactica: learned positions, LayerNorms before attention and MLP, or behind them (350m, whose embedding and
head are narrower than its layers too)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import SequentialLayer
from tgi.server.layers.decoder import Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding, PositionEmbedding
from tgi.server.layers.linear import MergedColumnLinear
from tgi.server.layers.mlp import MLP
from tgi.server.layers.norm import LayerNorm, NoNorm, Norm
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
EPS = 1e-5  # no configuration says it
FIRST_POSITION = 2  # row of the table


class NarrowEmbedding(Embedding):
    """Vectors that are widened to what the layers take."""

    def __init__(self, body: Source, vocab_size: int, size: int, hidden_size: int) -> None:
        super().__init__(body.at("embed_tokens"), vocab_size, size)
        self._widen = MergedColumnLinear(body, "project_in", size, [hidden_size], rows=[slice(0, hidden_size)])

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._widen(super().__call__(input_ids))


class NarrowHead:
    def __init__(self, body: Source, head: Callable[[torch.Tensor], torch.Tensor], hidden_size: int, size: int) -> None:
        self._narrow = MergedColumnLinear(body, "project_out", hidden_size, [size], rows=[slice(0, size)])
        self._head = head

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._narrow(hidden))


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    hidden_size, size = config.hidden_size, config.fields.count("word_embed_proj_dim", default=config.hidden_size)
    config.fields.only("scale_embeddings", False)
    body = body_of(source, "model.decoder")
    if size == hidden_size:
        embedding = Embedding(body.at("embed_tokens"), config.vocab_size, size)
        head = head_of(config, source, embedding)
    else:
        embedding = NarrowEmbedding(body, config.vocab_size, size, hidden_size)
        head = NarrowHead(body, head_of(config, source, embedding, size=size), hidden_size, size)
    layers, norm = _layers(config, body)
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        cache_shape=cache_shape([layer.attention for layer in layers]),
        positions=PositionEmbedding(
            body.at("embed_positions"),
            config.fields.count("max_position_embeddings"),
            hidden_size,
            offset=FIRST_POSITION,
        ),
    )


def _layers(config: ModelConfig, body: Source) -> tuple[list[SequentialLayer], Norm]:
    """And the norm behind them."""
    places = [body.at(f"layers.{index}") for index in range(config.num_layers)]
    attention_norms: list[Norm] = [_norm(config, place.at("self_attn_layer_norm")) for place in places]
    mlp_norms: list[Norm] = [_norm(config, place.at("final_layer_norm")) for place in places]
    last: Norm
    if is_before := config.fields.flag("do_layer_norm_before", default=True):
        is_bare = config.fields.flag("_remove_final_layer_norm")
        last = NoNorm(body) if is_bare else _norm(config, body.at("final_layer_norm"))
    else:
        # A norm behind one part stands before the next.
        attention_norms, mlp_norms, last = [NoNorm(body), *mlp_norms[:-1]], attention_norms, mlp_norms[-1]
    layers = [
        SequentialLayer(
            norm=norm,
            attention=_attention(config, place, index),
            mlp_norm=mlp_norm,
            mlp=_mlp(config, place),
            normed_stream=not is_before,
        )
        for index, (place, norm, mlp_norm) in enumerate(zip(places, attention_norms, mlp_norms, strict=True))
    ]
    return layers, last


def _attention(config: ModelConfig, source: Source, index: int) -> Attention:
    has_bias = config.fields.flag("enable_bias", default=True)
    return Attention(
        source.at("self_attn"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=has_bias,
        output_bias=has_bias,
        out="out_proj",
    )


def _mlp(config: ModelConfig, source: Source) -> MLP:
    has_bias = config.fields.flag("enable_bias", default=True)
    return MLP(
        source,
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        up="fc1",
        down="fc2",
        bias=has_bias,
    )


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    has_weight = config.fields.flag("layer_norm_elementwise_affine", default=True)
    return LayerNorm(source, config.hidden_size, EPS, weight=has_weight, bias=has_weight)
