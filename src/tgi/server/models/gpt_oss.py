"""gpt-oss: attention with sinks, windows in every other layer, experts with biases and a clamped SwiGLU.

The published checkpoints are in MXFP4, which is refused by that name; their bfloat16 forms are served, and GGUF files,
whose MXFP4 blocks are decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import SequentialLayer
from tgi.server.layers.decoder import FULL, SLIDING, Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import clamped_swiglu
from tgi.server.layers.moe import MixtureOfExperts, Router, check_top_k, stacked_gated_experts, top_then_softmax
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [
        _layer(config, body.at(f"layers.{index}"), index, is_windowed=kind == SLIDING)
        for index, kind in enumerate(_kinds(config))
    ]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(body.at("norm"), config.hidden_size, config.rms_norm_eps),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest)},
    )


def _layer(config: ModelConfig, source: Source, index: int, *, is_windowed: bool) -> SequentialLayer:
    attention = Attention(
        source.at("self_attn"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=config.attention_bias,
        output_bias=config.attention_bias,
        window=config.sliding_window if is_windowed else None,
        sinks="sinks",
    )
    return SequentialLayer(
        norm=RMSNorm(source.at("input_layernorm"), config.hidden_size, config.rms_norm_eps),
        attention=attention,
        mlp_norm=RMSNorm(source.at("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps),
        mlp=_mixture(config, source.at("mlp")),
    )


def _mixture(config: ModelConfig, source: Source) -> MixtureOfExperts:
    fields = config.fields
    num_experts = fields.count("num_local_experts", "num_experts")
    experts = stacked_gated_experts(
        source.at("experts"),
        num_experts,
        config.hidden_size,
        config.intermediate_size,
        clamped_swiglu(
            source, fields.number("swiglu_alpha", default=1.702), fields.number("swiglu_limit", default=7.0)
        ),
        bias=True,
        transposed=True,
        interleaved=True,
    )
    top_k = check_top_k(fields.count("num_experts_per_tok", "experts_per_token"), num_experts)
    router = Router(source, config.hidden_size, num_experts, name="router", bias=True)
    return MixtureOfExperts(source, router, top_then_softmax(top_k), experts)


def _kinds(config: ModelConfig) -> tuple[str, ...]:
    if config.layer_types is not None:
        return config.layer_types
    return tuple(FULL if index % 2 else SLIDING for index in range(config.num_layers))
