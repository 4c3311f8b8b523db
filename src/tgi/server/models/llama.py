"""Llama and what shares its layers: Mistral, Yi, SmolLM. Pre-norm decoder, grouped-query attention, gated MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention
from tgi.server.layers.embedding import Embedding, Head
from tgi.server.layers.mlp import GatedMLP
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.rotary import Rotation, make_rotary
from tgi.server.layers.source import Source
from tgi.server.models.model import CacheShape

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
DEFAULT_MAX_POSITIONS = 2048  # the architecture's, where a configuration does not say


class LlamaLayer:
    def __init__(self, config: ModelConfig, source: Source, index: int) -> None:
        self.input_norm = RMSNorm(source.at("input_layernorm"), config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(
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
        self.mlp_norm = RMSNorm(source.at("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(
            source.at("mlp"), config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias
        )

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotation: Rotation, context: ForwardContext
    ) -> torch.Tensor:
        """Adds the last layer's `update` and its own attention to `residual` (float32), in place; returns its MLP's
        update.

        Leaving the last sum to the next norm saves one pass over memory per layer.
        """
        hidden = self.input_norm(residual) if update is None else self.input_norm.add(update, residual)
        hidden = self.attention(hidden, rotation, context)
        return self.mlp(self.mlp_norm.add(hidden, residual))


class Llama:
    def __init__(self, config: ModelConfig, source: Source, longest: int | None = None) -> None:
        # A model saved without its head has no outer prefix.
        body = source if source.has("embed_tokens.weight") else source.at("model")
        self.embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
        self.layers = [LlamaLayer(config, body.at(f"layers.{index}"), index) for index in range(config.num_layers)]
        self.norm = RMSNorm(body.at("norm"), config.hidden_size, config.rms_norm_eps)
        # Files of tied models come without a head, whatever their configuration says.
        tied = config.tie_word_embeddings or source.lacks("lm_head.weight")
        self.head = Head(source, "lm_head", config.vocab_size, config.hidden_size, self.embedding if tied else None)
        self.rotary = make_rotary(
            dim=config.head_dim,
            theta=config.rope_theta,
            max_positions=config.max_position_embeddings or DEFAULT_MAX_POSITIONS,
            scaling=config.rope_scaling,
            device=source.device,
            longest=longest,
            divisors=source.tensor("rope_freqs.weight", (config.head_dim // 2,))
            if source.has("rope_freqs.weight")
            else None,
        )
        attention = self.layers[0].attention
        self.cache_shape = CacheShape(config.num_layers, attention.num_kv_heads, attention.num_heads, config.head_dim)
        self.vocab_size = config.vocab_size
        self.weight_bytes = source.kept_bytes

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens] ids and positions -> [tokens, hidden]"""
        residual = self.embedding(input_ids).float()
        rotation = self.rotary(positions)
        update = None
        for layer in self.layers:
            update = layer(update, residual, rotation, context)
        return self.norm(residual) if update is None else self.norm.add(update, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        return self.head(hidden)


Model = Llama
