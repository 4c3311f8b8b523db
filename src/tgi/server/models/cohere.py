"""Command-R (cohere) and Command-R7B (cohere2): attention and MLP beside each other on one norm, interleaved rotation.

cohere2: windows in most layers; those without one know no positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.decoder import FULL, SLIDING, Decoder, Rotations, body_of, entered, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import GatedMLP
from tgi.server.layers.norm import HeadLayerNorm, LayerNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
LOGIT_SCALE = 0.0625
EPS = 1e-5


class CohereLayer:
    def __init__(self, config: ModelConfig, source: Source, index: int, kind: str) -> None:
        self._kind = kind
        attention = source.at("self_attn")
        self.norm = _norm(config, source.at("input_layernorm"))
        self.attention = Attention(
            attention,
            index,
            hidden_size=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=config.sliding_window if kind == SLIDING else None,
        )
        if config.fields.flag("use_qk_norm"):
            share = self.attention.share
            self.attention.query_norm = _head_norm(config, attention.at("q_norm"), config.num_heads, share.query)
            self.attention.key_norm = _head_norm(config, attention.at("k_norm"), config.num_kv_heads, share.key_value)
        self.mlp = GatedMLP(source.at("mlp"), config.hidden_size, config.intermediate_size, config.hidden_act)

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotations: Rotations, context: ForwardContext
    ) -> torch.Tensor:
        hidden = entered(self.norm, update, residual)
        return self.attention(hidden, rotations.get(self._kind), context).add_(self.mlp(hidden))


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    config.fields.only("use_parallel_block", True)
    config.fields.only("use_gated_activation", True)
    config.fields.only("position_embedding_type", "rope_gptj")
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [CohereLayer(config, body.at(f"layers.{index}"), index, kind) for index, kind in enumerate(_kinds(config))]
    rotated = SLIDING if config.model_type == "cohere2" else FULL
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("norm")),
        head=head_of(config, source, embedding, scale=config.fields.number("logit_scale", default=LOGIT_SCALE)),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={rotated: rotary_of(config, source, longest, interleaved=True)},
    )


def _kinds(config: ModelConfig) -> tuple[str, ...]:
    if config.model_type == "cohere":
        return (FULL,) * config.num_layers
    if config.layer_types is not None:
        return config.layer_types
    every = config.fields.count("sliding_window_pattern", default=4)
    return tuple(FULL if (index + 1) % every == 0 else SLIDING for index in range(config.num_layers))


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, config.fields.number("layer_norm_eps", default=EPS), bias=False)


def _head_norm(config: ModelConfig, source: Source, heads: int, own: slice) -> HeadLayerNorm:
    weight = source.tensor("weight", (heads, config.head_dim), (own,), dtype=torch.float32)
    return HeadLayerNorm(weight, config.fields.number("layer_norm_eps", default=EPS))
