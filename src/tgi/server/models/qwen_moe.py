"""Qwen2-MoE and Qwen3-MoE: Llama's attention with biases or with norms of queries and keys, experts in most layers.

Qwen2-MoE: an expert that every token shares, each by its own measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.errors import StartupError
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import FeedForward, SequentialLayer
from tgi.server.layers.decoder import FULL, SLIDING, Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import GatedMLP, gated_activation
from tgi.server.layers.moe import (
    MixtureOfExperts,
    Router,
    SigmoidGated,
    check_top_k,
    gated_experts,
    softmax_then_top,
)
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, body.at(f"layers.{index}"), index) for index in range(config.num_layers)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(body.at("norm"), config.hidden_size, config.rms_norm_eps),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest)},
    )


def _layer(config: ModelConfig, source: Source, index: int) -> SequentialLayer:
    mlp = source.at("mlp")
    return SequentialLayer(
        norm=RMSNorm(source.at("input_layernorm"), config.hidden_size, config.rms_norm_eps),
        attention=_attention(config, source.at("self_attn"), index),
        mlp_norm=RMSNorm(source.at("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps),
        mlp=_mixture(config, mlp) if _is_sparse(config, index) else _shared(config, mlp, config.intermediate_size),
    )


def _attention(config: ModelConfig, source: Source, index: int) -> Attention:
    is_qwen2 = config.model_type == "qwen2_moe"
    attention = Attention(
        source,
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=config.fields.flag("qkv_bias", default=True) if is_qwen2 else config.attention_bias,
        output_bias=config.attention_bias and not is_qwen2,
        window=_window(config, index),
    )
    if not is_qwen2:
        attention.query_norm = RMSNorm(source.at("q_norm"), config.head_dim, config.rms_norm_eps)
        attention.key_norm = RMSNorm(source.at("k_norm"), config.head_dim, config.rms_norm_eps)
    return attention


def _mixture(config: ModelConfig, source: Source) -> MixtureOfExperts:
    fields = config.fields
    num_experts = fields.count("num_experts", "num_local_experts")
    experts = gated_experts(
        source.at("experts"),
        num_experts,
        config.hidden_size,
        fields.count("moe_intermediate_size"),
        gated_activation(source, config.hidden_act),
    )
    shared = None
    if config.model_type == "qwen2_moe":
        mlp = _shared(config, source.at("shared_expert"), fields.count("shared_expert_intermediate_size"))
        shared = SigmoidGated(source, "shared_expert_gate", config.hidden_size, mlp)
    top_k = check_top_k(fields.count("num_experts_per_tok"), num_experts)
    return MixtureOfExperts(
        source,
        Router(source, config.hidden_size, num_experts),
        softmax_then_top(top_k, normalise=fields.flag("norm_topk_prob")),
        experts,
        shared=shared,
    )


def _shared(config: ModelConfig, source: Source, intermediate_size: int) -> FeedForward:
    return GatedMLP(source, config.hidden_size, intermediate_size, config.hidden_act)


def _is_sparse(config: ModelConfig, index: int) -> bool:
    dense = config.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise StartupError(f"config.json: mlp_only_layers must be a list of layers, not {dense!r}")
    return index not in dense and (index + 1) % config.fields.count("decoder_sparse_step", default=1) == 0


def _window(config: ModelConfig, index: int) -> int | None:
    """Qwen3-MoE: of every layer. Qwen2-MoE: of those that `layer_types` says, else of every other one of the first."""
    if not config.fields.flag("use_sliding_window"):
        return None
    is_windowed = True
    if config.layer_types is not None:
        is_windowed = config.layer_types[index] == SLIDING
    elif config.model_type == "qwen2_moe":
        is_windowed = index % 2 == 0 and index < config.fields.count("max_window_layers", default=28)
    return config.sliding_window if is_windowed else None
