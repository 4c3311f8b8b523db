"""OLMo 2 and OLMo 3: norms behind attention and MLP instead of before them, queries and keys normed over all heads.

OLMo 3: windows in most layers, whose rotation is not scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.decoder import FULL, SLIDING, Decoder, Rotations, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import GatedMLP
from tgi.server.layers.norm import RMSNorm, WholeRMSNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
WINDOWED_OF_FOUR = 3  # where a configuration does not say which layers


class Olmo2Layer:
    def __init__(self, config: ModelConfig, source: Source, index: int, kind: str) -> None:
        self._kind = kind
        self._dtype = source.dtype
        attention = source.at("self_attn")
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
        share, eps = self.attention.share, config.rms_norm_eps
        self.attention.query_norm = WholeRMSNorm(
            attention.at("q_norm"), config.num_heads, share.query, config.head_dim, eps
        )
        self.attention.key_norm = WholeRMSNorm(
            attention.at("k_norm"), config.num_kv_heads, share.key_value, config.head_dim, eps, share.copies
        )
        self.attention_norm = RMSNorm(source.at("post_attention_layernorm"), config.hidden_size, eps)
        self.mlp = GatedMLP(source.at("mlp"), config.hidden_size, config.intermediate_size, config.hidden_act)
        self.mlp_norm = RMSNorm(source.at("post_feedforward_layernorm"), config.hidden_size, eps)

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotations: Rotations, context: ForwardContext
    ) -> torch.Tensor:
        # No norm reads the stream within a layer: the sums are made here.
        if update is not None:
            residual.add_(update)
        hidden = self.attention(residual.to(self._dtype), rotations[self._kind], context)
        residual.add_(self.attention_norm(hidden))
        return self.mlp_norm(self.mlp(residual.to(self._dtype)))


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    kinds = _kinds(config)
    layers = [Olmo2Layer(config, body.at(f"layers.{index}"), index, kind) for index, kind in enumerate(kinds)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(body.at("norm"), config.hidden_size, config.rms_norm_eps),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={
            kind: rotary_of(config, source, longest, kind=kind, scaled=kind == FULL) for kind in sorted(set(kinds))
        },
    )


def _kinds(config: ModelConfig) -> tuple[str, ...]:
    if config.layer_types is not None:
        return config.layer_types
    if config.model_type == "olmo2":
        return (FULL,) * config.num_layers
    return tuple(SLIDING if index % 4 < WINDOWED_OF_FOUR else FULL for index in range(config.num_layers))
