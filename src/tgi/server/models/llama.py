"""Llama and what differs from it by a flag. Pre-norm decoder, grouped-query attention, gated MLP.

Mistral, Yi, SmolLM; Granite (multipliers), Phi-3 (fused projections, part of a head rotated), Qwen2 (biases), Qwen3
(norms of queries and keys), SmolLM3 (layers without positions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.decoder import SLIDING, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import GatedMLP
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.rotary import Rotation, rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, slots=True)
class Traits:
    """What config.json does not say: it follows from the model_type."""

    qkv_bias: bool = False  # whatever attention_bias says
    head_norms: bool = False  # of queries and keys
    has_window: bool = False  # sliding_window counts
    asks_for_window: bool = False  # it counts only with use_sliding_window
    skips_positions: bool = False  # some layers rotate nothing


TRAITS: Mapping[str, Traits] = {
    "mistral": Traits(has_window=True),
    "phi3": Traits(has_window=True),
    "qwen2": Traits(qkv_bias=True, asks_for_window=True),
    "qwen3": Traits(head_norms=True, asks_for_window=True),
    "smollm3": Traits(asks_for_window=True, skips_positions=True),
}


class LlamaLayer:
    def __init__(self, config: ModelConfig, source: Source, index: int, traits: Traits) -> None:
        self.input_norm = RMSNorm(source.at("input_layernorm"), config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(
            source.at("self_attn"),
            index,
            hidden_size=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias or traits.qkv_bias,
            output_bias=config.attention_bias and not traits.qkv_bias,
            scale=config.fields.optional_number("attention_multiplier"),
            window=_window(config, index, traits),
        )
        if traits.head_norms:
            at = source.at("self_attn")
            self.attention.query_norm = RMSNorm(at.at("q_norm"), config.head_dim, config.rms_norm_eps)
            self.attention.key_norm = RMSNorm(at.at("k_norm"), config.head_dim, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(source.at("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(
            source.at("mlp"), config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias
        )
        self._is_rotated = not traits.skips_positions or _is_rotated(config, index)
        self._multiplier = config.fields.number("residual_multiplier", default=1.0)

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotation: Rotation, context: ForwardContext
    ) -> torch.Tensor:
        """Adds the last layer's `update` and its own attention to `residual` (float32), in place; returns its MLP's
        update.

        Leaving the last sum to the next norm saves one pass over memory per layer.
        """
        hidden = self.input_norm(residual) if update is None else self.input_norm.add(update, residual)
        hidden = self.attention(hidden, rotation if self._is_rotated else None, context)
        if self._multiplier != 1.0:
            return self.mlp(self.mlp_norm.add(hidden.mul_(self._multiplier), residual)).mul_(self._multiplier)
        return self.mlp(self.mlp_norm.add(hidden, residual))


class Llama:
    def __init__(self, config: ModelConfig, source: Source, longest: int | None = None) -> None:
        traits = TRAITS.get(config.model_type, Traits())
        config.fields.only("rope_interleaved", False)
        body = body_of(source)
        self.embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
        self.layers = [
            LlamaLayer(config, body.at(f"layers.{index}"), index, traits) for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(body.at("norm"), config.hidden_size, config.rms_norm_eps)
        scale = 1.0 / config.fields.number("logits_scaling", default=1.0)
        self.head = head_of(config, source, self.embedding, scale=scale)
        self.rotary = rotary_of(config, source, longest)
        self.cache_shape = cache_shape([layer.attention for layer in self.layers])
        self.vocab_size = config.vocab_size
        self.weight_bytes = source.kept_bytes
        self._multiplier = config.fields.number("embedding_multiplier", default=1.0)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens] ids and positions -> [tokens, hidden]"""
        residual = self.embedding(input_ids).float()
        if self._multiplier != 1.0:
            residual.mul_(self._multiplier)
        rotation = self.rotary(positions)
        update = None
        for layer in self.layers:
            update = layer(update, residual, rotation, context)
        return self.norm(residual) if update is None else self.norm.add(update, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        return self.head(hidden)


def _window(config: ModelConfig, index: int, traits: Traits) -> int | None:
    kinds = config.layer_types
    if not traits.has_window and not (traits.asks_for_window and config.fields.flag("use_sliding_window")):
        return None
    if kinds is not None:
        has_window = kinds[index] == SLIDING
    elif traits.skips_positions:
        has_window = not _is_rotated(config, index)
    elif traits.asks_for_window and config.fields.get("max_window_layers"):
        has_window = index >= config.fields.count("max_window_layers")
    else:
        has_window = True
    return config.sliding_window if has_window else None


def _is_rotated(config: ModelConfig, index: int) -> bool:
    """Of every four layers the last one knows no positions, unless a list says otherwise."""
    flags = config.fields.get("no_rope_layers")  # 1: rotated, whatever the name says
    if flags is not None:
        return bool(flags[index])
    return (index + 1) % config.fields.count("no_rope_layer_interval", default=4) != 0


Model = Llama
