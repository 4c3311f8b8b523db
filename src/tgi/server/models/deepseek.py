"""DeepSeek-V2 and V3: latent attention; a few dense layers, then experts, of which groups are chosen first.

V3: sigmoid scores, with a correction that takes part in the choice alone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from tgi.errors import StartupError
from tgi.model_config import Fields
from tgi.server.layers.attention import cache_shape
from tgi.server.layers.blocks import FeedForward, SequentialLayer
from tgi.server.layers.decoder import FULL, Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.latent_attention import PACKED as LATENTS
from tgi.server.layers.latent_attention import LatentAttention
from tgi.server.layers.mlp import GatedMLP, gated_activation
from tgi.server.layers.moe import MixtureOfExperts, Route, Router, check_top_k, gated_experts, grouped_top
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {**LATENTS, "gate_up_proj": ("gate_proj", "up_proj")}
METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORES = {"softmax": partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid}  # of logits [tokens, experts]


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, body.at(f"layers.{index}"), index) for index in range(config.num_layers)]
    rotary = rotary_of(
        config,
        source,
        longest,
        dim=config.fields.count("qk_rope_head_dim"),
        interleaved=config.fields.flag("rope_interleave", default=True),
    )
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(body.at("norm"), config.hidden_size, config.rms_norm_eps),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary},
    )


def _layer(config: ModelConfig, source: Source, index: int) -> SequentialLayer:
    mlp = source.at("mlp")
    return SequentialLayer(
        norm=RMSNorm(source.at("input_layernorm"), config.hidden_size, config.rms_norm_eps),
        attention=_attention(config, source.at("self_attn"), index),
        mlp_norm=RMSNorm(source.at("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps),
        mlp=_mixture(config, mlp) if _is_sparse(config, index) else _mlp(config, mlp, config.intermediate_size),
    )


def _attention(config: ModelConfig, source: Source, index: int) -> LatentAttention:
    fields = config.fields
    plain_dim, rotary_dim = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    return LatentAttention(
        source,
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        query_rank=fields.optional_count("q_lora_rank"),
        kv_rank=fields.count("kv_lora_rank"),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=fields.count("v_head_dim"),
        scale=(plain_dim + rotary_dim) ** -0.5 * _yarn_scale(config),
        bias=config.attention_bias,
    )


def _yarn_scale(config: ModelConfig) -> float:
    """Scores of a stretched context are sharpened: queries and keys by the same factor each."""
    scaling = Fields(config.rope_scaling or {}, "rope_scaling")
    factor, measure = scaling.number("factor", default=1.0), scaling.get("mscale_all_dim")
    if not measure or factor <= 1.0:
        return 1.0
    return (0.1 * scaling.number("mscale_all_dim", default=1.0) * math.log(factor) + 1.0) ** 2


def _is_sparse(config: ModelConfig, index: int) -> bool:
    fields = config.fields
    first = fields.count("first_k_dense_replace") if fields.get("first_k_dense_replace") else 0
    return index >= first and index % fields.count("moe_layer_freq", default=1) == 0


def _mlp(config: ModelConfig, source: Source, intermediate_size: int) -> FeedForward:
    return GatedMLP(source, config.hidden_size, intermediate_size, config.hidden_act, bias=config.mlp_bias)


def _mixture(config: ModelConfig, source: Source) -> MixtureOfExperts:
    fields = config.fields
    num_experts = fields.count("n_routed_experts")
    inner = fields.count("moe_intermediate_size")
    experts = gated_experts(
        source.at("experts"), num_experts, config.hidden_size, inner, gated_activation(source, config.hidden_act)
    )
    num_shared = fields.count("n_shared_experts") if fields.get("n_shared_experts") else 0
    return MixtureOfExperts(
        source,
        Router(source, config.hidden_size, num_experts),
        _route(config, source, num_experts),
        experts,
        shared=_mlp(config, source.at("shared_experts"), num_shared * inner) if num_shared else None,
    )


def _route(config: ModelConfig, source: Source, num_experts: int) -> Route:
    fields = config.fields
    method = fields.text("topk_method") or ("greedy" if config.model_type == "deepseek_v2" else "noaux_tc")
    if method not in METHODS:
        raise StartupError(f"config.json: topk_method {method!r} is not supported; {', '.join(METHODS)} are")
    scoring = fields.text("scoring_func") or ("sigmoid" if method == "noaux_tc" else "softmax")
    if scoring not in SCORES:
        raise StartupError(f"config.json: scoring_func {scoring!r} is not supported; {', '.join(SCORES)} are")
    groups, top_groups = fields.count("n_group", default=1), fields.count("topk_group", default=1)
    if method == "greedy":
        groups = top_groups = 1
    top_k = check_top_k(fields.count("num_experts_per_tok"), num_experts, groups, top_groups)
    route = partial(
        grouped_top,
        top_k,
        groups,
        top_groups,
        score=SCORES[scoring],
        normalise=fields.flag("norm_topk_prob", default=method == "noaux_tc"),
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
    if method == "noaux_tc":
        bias = source.tensor("gate.e_score_correction_bias", (num_experts,), dtype=torch.float32)
        return route(bias=bias, per_group=2)
    return route()
