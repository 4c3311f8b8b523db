"""DBRX: clipped queries, keys and values in one projection, LayerNorms without biases, many experts in few tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.errors import StartupError
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import SequentialLayer
from tgi.server.layers.decoder import FULL, Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import gated_activation
from tgi.server.layers.moe import MixtureOfExperts, Router, check_top_k, flat_gated_experts, softmax_then_top
from tgi.server.layers.norm import LayerNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED: dict[str, tuple[str, ...]] = {}
EPS = 1e-5  # no configuration says another


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source, "transformer", "wte.weight")
    embedding = Embedding(body.at("wte"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, body.at(f"blocks.{index}"), index) for index in range(config.num_layers)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("norm_f")),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest)},
    )


def _layer(config: ModelConfig, source: Source, index: int) -> SequentialLayer:
    place = source.at("norm_attn_norm")
    attention = Attention(
        place.at("attn"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv="Wqkv",
        out="out_proj",
        clip=config.fields.optional_number("clip_qkv"),
    )
    return SequentialLayer(
        norm=_norm(config, place.at("norm_1")),
        attention=attention,
        mlp_norm=_norm(config, place.at("norm_2")),
        mlp=_mixture(config, source.at("ffn")),
    )


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, EPS, bias=False)


def _mixture(config: ModelConfig, source: Source) -> MixtureOfExperts:
    num_experts = config.fields.count("moe_num_experts", default=4)
    experts = flat_gated_experts(
        source.at("experts.mlp"),
        num_experts,
        config.hidden_size,
        config.intermediate_size,
        gated_activation(source, _activation(config)),
        names=("w1", "v1", "w2"),
    )
    top_k = check_top_k(config.fields.count("moe_top_k", default=1), num_experts)
    router = Router(source, config.hidden_size, num_experts, name="router.layer")
    return MixtureOfExperts(source, router, softmax_then_top(top_k, normalise=_is_normalised(config)), experts)


def _activation(config: ModelConfig) -> str:
    given = config.fields.get("ffn_act_fn")
    return given.get("name", "silu") if isinstance(given, dict) else "silu"


def _is_normalised(config: ModelConfig) -> bool:
    """The order of the norm that a token's weights are divided by; null for none."""
    order = config.fields.values.get("moe_normalize_expert_weights", 1)
    if order not in (None, 1):
        raise StartupError(f"config.json: moe_normalize_expert_weights must be 1 or null, not {order!r}")
    return order is not None
