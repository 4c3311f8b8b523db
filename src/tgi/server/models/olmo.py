"""OLMo: norms without weights, queries, keys and values clipped. (OLMo 2 and 3 are another architecture.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.decoder import FULL, Decoder, Rotations, body_of, entered, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import GatedMLP
from tgi.server.layers.norm import LayerNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
EPS = 1e-5  # no configuration says it


class OlmoLayer:
    def __init__(self, config: ModelConfig, source: Source, index: int) -> None:
        self.norm = LayerNorm(source, config.hidden_size, EPS, weight=False, bias=False)  # both places of a layer
        self.attention = Attention(
            source.at("self_attn"),
            index,
            hidden_size=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            clip=config.fields.optional_number("clip_qkv"),
        )
        self.mlp = GatedMLP(source.at("mlp"), config.hidden_size, config.intermediate_size, config.hidden_act)

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotations: Rotations, context: ForwardContext
    ) -> torch.Tensor:
        hidden = self.attention(entered(self.norm, update, residual), rotations[FULL], context)
        return self.mlp(self.norm.add(hidden, residual))


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [OlmoLayer(config, body.at(f"layers.{index}"), index) for index in range(config.num_layers)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=LayerNorm(body, config.hidden_size, EPS, weight=False, bias=False),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest)},
    )
