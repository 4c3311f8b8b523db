"""Falcon, under its older names too (RefinedWeb, RefinedWebModel). Queries, keys and values in one tensor.

7B: one key-value head, attention and MLP beside each other on one norm. 40B and up ("new decoder architecture"): groups
of heads, and a norm for each of the two. RW: attention and MLP one after the other, linear biases instead of rotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tgi.server.layers.attention import Attention, alibi_slopes, cache_shape
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


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source, "transformer", "word_embeddings.weight")
    embedding = Embedding(body.at("word_embeddings"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, body.at(f"h.{index}"), index) for index in range(config.num_layers)]
    has_alibi = config.fields.flag("alibi")
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("ln_f")),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={} if has_alibi else {FULL: rotary_of(config, source, longest)},
    )


def _layer(config: ModelConfig, source: Source, index: int) -> ParallelLayer | SequentialLayer:
    fields = config.fields
    has_bias = fields.flag("bias")
    attention = Attention(
        source.at("self_attention"),
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
        alibi=_slopes(config) if fields.flag("alibi") else None,
    )
    mlp = MLP(
        source.at("mlp"),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        bias=has_bias,
    )
    is_new = fields.flag("new_decoder_architecture", default=fields.get("n_head_kv") is not None)
    if is_new and fields.count("num_ln_in_parallel_attn", default=2) == 2:
        norm, mlp_norm = _norm(config, source.at("ln_attn")), _norm(config, source.at("ln_mlp"))
        return ParallelLayer(norm=norm, attention=attention, mlp=mlp, mlp_norm=mlp_norm)
    norm = _norm(config, source.at("input_layernorm"))
    if is_new or fields.flag("parallel_attn", default=True):
        return ParallelLayer(norm=norm, attention=attention, mlp=mlp)
    mlp_norm = _norm(config, source.at("post_attention_layernorm"))
    return SequentialLayer(norm=norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)


def _slopes(config: ModelConfig) -> torch.Tensor:
    """Falcon scales its biases with the scores."""
    return alibi_slopes(config.num_heads) * config.head_dim**-0.5


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, config.fields.number("layer_norm_epsilon", default=EPS))
