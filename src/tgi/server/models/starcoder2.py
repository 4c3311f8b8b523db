"""StarCoder2: LayerNorms, a plain MLP, biases, grouped-query attention with rotation, windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import SequentialLayer
from tgi.server.layers.decoder import FULL, Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import MLP
from tgi.server.layers.norm import LayerNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
EPS = 1e-5


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    config.fields.only("norm_type", "layer_norm")
    config.fields.only("mlp_type", "default")
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, body.at(f"layers.{index}"), index) for index in range(config.num_layers)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("norm")),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest)},
    )


def _layer(config: ModelConfig, source: Source, index: int) -> SequentialLayer:
    has_bias = config.fields.flag("use_bias", default=True)
    attention = Attention(
        source.at("self_attn"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=has_bias,
        output_bias=has_bias,
        window=config.sliding_window,
    )
    mlp = MLP(
        source.at("mlp"),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        up="c_fc",
        down="c_proj",
        bias=has_bias,
    )
    return SequentialLayer(
        norm=_norm(config, source.at("input_layernorm")),
        attention=attention,
        mlp_norm=_norm(config, source.at("post_attention_layernorm")),
        mlp=mlp,
    )


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, config.fields.number("norm_epsilon", default=EPS))
