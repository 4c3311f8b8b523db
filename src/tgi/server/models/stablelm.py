"""StableLM (at first stablelm_epoch): LayerNorms, a quarter of each head rotated, optionally attention and MLP beside
each other on one norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.decoder import FULL, Decoder, Rotations, body_of, entered, head_of
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
EPS = 1e-5
ROTATED = 0.25  # of a head, where a configuration does not say


class StableLMLayer:
    def __init__(self, config: ModelConfig, source: Source, index: int) -> None:
        attention = source.at("self_attn")
        self.input_norm = _norm(config, source.at("input_layernorm"))
        self.attention = Attention(
            attention,
            index,
            hidden_size=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.fields.flag("use_qkv_bias"),
        )
        if config.fields.flag("qk_layernorm"):
            share = self.attention.share
            self.attention.query_norm = _head_norms(config, attention.at("q_layernorm.norms"), share.query)
            self.attention.key_norm = _head_norms(config, attention.at("k_layernorm.norms"), share.key_value)
        self.mlp = GatedMLP(source.at("mlp"), config.hidden_size, config.intermediate_size, config.hidden_act)
        is_parallel = config.fields.flag("use_parallel_residual")
        self.mlp_norm = None if is_parallel else _norm(config, source.at("post_attention_layernorm"))

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotations: Rotations, context: ForwardContext
    ) -> torch.Tensor:
        hidden = entered(self.input_norm, update, residual)
        attended = self.attention(hidden, rotations[FULL], context)
        if self.mlp_norm is None:
            return attended.add_(self.mlp(hidden))
        return self.mlp(self.mlp_norm.add(attended, residual))


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    config.fields.only("rotary_scaling_factor", 1.0)
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [StableLMLayer(config, body.at(f"layers.{index}"), index) for index in range(config.num_layers)]
    rotated = int(config.head_dim * (config.partial_rotary_factor or ROTATED))
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("norm")),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest, dim=rotated)},
    )


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, config.fields.number("layer_norm_eps", "norm_eps", default=EPS))


def _head_norms(config: ModelConfig, source: Source, own: slice) -> HeadLayerNorm:
    weights = [
        source.at(str(head)).tensor("weight", (config.head_dim,), dtype=torch.float32)
        for head in range(own.start, own.stop)
    ]
    return HeadLayerNorm(torch.stack(weights), config.fields.number("layer_norm_eps", default=EPS))
