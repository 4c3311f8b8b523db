"""GPT-NeoX and Pythia: attention and MLP beside each other with a norm each, or one after the other; part of a head
rotated; queries, keys and values of a head together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import ParallelLayer, SequentialLayer
from tgi.server.layers.decoder import FULL, Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import MLP
from tgi.server.layers.norm import LayerNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED: dict[str, tuple[str, ...]] = {}
EPS = 1e-5
ROTATED = 0.25  # of a head, where a configuration does not say


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source, "gpt_neox", "embed_in.weight")
    embedding = Embedding(body.at("embed_in"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, body.at(f"layers.{index}"), index) for index in range(config.num_layers)]
    rotated = int(config.head_dim * (config.partial_rotary_factor or ROTATED))
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("final_layer_norm")),
        head=head_of(config, source, embedding, name="lm_head" if source.has("lm_head.weight") else "embed_out"),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest, dim=rotated)},
    )


def _layer(config: ModelConfig, source: Source, index: int) -> ParallelLayer | SequentialLayer:
    has_bias = config.fields.flag("attention_bias", default=True)
    attention = Attention(
        source.at("attention"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=has_bias,
        output_bias=has_bias,
        qkv="query_key_value",
        out="dense",
        grouped=True,
    )
    mlp = MLP(
        source.at("mlp"),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        bias=True,
    )
    shape = ParallelLayer if config.fields.flag("use_parallel_residual", default=True) else SequentialLayer
    return shape(
        norm=_norm(config, source.at("input_layernorm")),
        attention=attention,
        mlp_norm=_norm(config, source.at("post_attention_layernorm")),
        mlp=mlp,
    )


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, config.fields.number("layer_norm_eps", default=EPS))
