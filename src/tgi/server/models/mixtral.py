"""Mixtral and Phi-MoE: Llama's attention, a mixture of experts in every layer.

Phi-MoE: LayerNorms, biases, experts chosen by SparseMixer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.errors import StartupError
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import SequentialLayer
from tgi.server.layers.decoder import FULL, Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import gated_activation
from tgi.server.layers.moe import (
    MixtureOfExperts,
    Route,
    Router,
    check_top_k,
    gated_experts,
    softmax_then_top,
    sparse_mixer,
)
from tgi.server.layers.norm import LayerNorm, RMSNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
JITTER = 0.01  # of SparseMixer, where a configuration does not say
CHOSEN = 2  # experts of a token; all that SparseMixer can


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
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
    attention = Attention(
        source.at("self_attn"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=config.attention_bias,
        output_bias=config.attention_bias,
        window=config.sliding_window,
    )
    return SequentialLayer(
        norm=_norm(config, source.at("input_layernorm")),
        attention=attention,
        mlp_norm=_norm(config, source.at("post_attention_layernorm")),
        mlp=_mixture(config, source),
    )


def _norm(config: ModelConfig, source: Source) -> RMSNorm | LayerNorm:
    if config.model_type == "phimoe":
        return LayerNorm(source, config.hidden_size, config.rms_norm_eps)
    return RMSNorm(source, config.hidden_size, config.rms_norm_eps)


def _mixture(config: ModelConfig, layer: Source) -> MixtureOfExperts:
    hub = layer.at("block_sparse_moe")  # files of the hub; transformers has renamed it, and Phi-MoE's router
    place = hub if hub.has("gate.weight") else layer.at("mlp")
    num_experts = config.fields.count("num_local_experts")
    experts = gated_experts(
        place.at("experts"),
        num_experts,
        config.hidden_size,
        config.intermediate_size,
        gated_activation(layer, config.hidden_act),
        names=("w1", "w3", "w2"),
    )
    router = Router(place, config.hidden_size, num_experts, name="router" if place.has("router.weight") else "gate")
    return MixtureOfExperts(place, router, _route(config, num_experts), experts)


def _route(config: ModelConfig, num_experts: int) -> Route:
    top_k = check_top_k(config.fields.count("num_experts_per_tok", default=CHOSEN), num_experts)
    if config.model_type != "phimoe":
        return softmax_then_top(top_k)
    if top_k != CHOSEN:
        raise StartupError(f"config.json: num_experts_per_tok of a phimoe model must be {CHOSEN}, not {top_k}")
    return sparse_mixer(config.fields.number("router_jitter_noise", default=JITTER))
