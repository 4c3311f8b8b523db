"""Gemma, Gemma 2 and the text part of Gemma 3: norms whose weight is a difference from one, a scaled embedding.

Since Gemma 2: a norm behind attention and MLP too, windows in turn with full attention, soft caps. Gemma 3: norms of
queries and keys instead of soft caps, and a rotation of its own for layers with a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tgi.server.context import ForwardContext
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.decoder import FULL, SLIDING, Decoder, Rotations, body_of, entered, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import GatedMLP
from tgi.server.layers.norm import RMSNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
LOCAL_THETA = 10_000.0  # of Gemma 3's layers with a window
QUERY_SCALAR = 256  # where a configuration does not say


class GemmaLayer:
    def __init__(self, config: ModelConfig, source: Source, index: int, kind: str) -> None:
        self.kind = kind
        is_first = config.model_type == "gemma"
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
            scale=None if is_first else config.fields.number("query_pre_attn_scalar", default=QUERY_SCALAR) ** -0.5,
            window=config.sliding_window if kind == SLIDING else None,
            softcap=config.fields.optional_number("attn_logit_softcapping"),
        )
        if config.model_type == "gemma3_text":
            self.attention.query_norm = _norm(config, attention.at("q_norm"), config.head_dim)
            self.attention.key_norm = _norm(config, attention.at("k_norm"), config.head_dim)
        self.mlp = GatedMLP(source.at("mlp"), config.hidden_size, config.intermediate_size, _activation(config))
        self.input_norm = _norm(config, source.at("input_layernorm"))
        after = _norm(config, source.at("post_attention_layernorm"))
        # The first Gemma's only norm between the two has the name of what follows attention in the later ones.
        self.attention_norm = None if is_first else after
        self.mlp_norm = after if is_first else _norm(config, source.at("pre_feedforward_layernorm"))
        self.output_norm = None if is_first else _norm(config, source.at("post_feedforward_layernorm"))

    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotations: Rotations, context: ForwardContext
    ) -> torch.Tensor:
        hidden = entered(self.input_norm, update, residual)
        hidden = self.attention(hidden, rotations[self.kind], context)
        if self.attention_norm is not None:
            hidden = self.attention_norm(hidden)
        hidden = self.mlp(self.mlp_norm.add(hidden, residual))
        return hidden if self.output_norm is None else self.output_norm(hidden)


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    config.fields.only("use_bidirectional_attention", False)
    body = body_of(source)
    embedding = Embedding(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
    layers = [GemmaLayer(config, body.at(f"layers.{index}"), index, kind) for index, kind in enumerate(_kinds(config))]
    rotaries = {FULL: rotary_of(config, source, longest, kind=FULL)}
    if config.model_type == "gemma3_text":
        rotaries[SLIDING] = rotary_of(config, source, longest, kind=SLIDING, theta=_local_theta(config), scaled=False)
    else:
        rotaries[SLIDING] = rotaries[FULL]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("norm")),
        head=head_of(config, source, embedding, softcap=config.fields.optional_number("final_logit_softcapping")),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={kind: rotary for kind, rotary in rotaries.items() if kind in {layer.kind for layer in layers}},
        # As it was trained: rounded to the format of the weights.
        embedding_scale=float(torch.tensor(config.hidden_size**0.5, dtype=source.dtype)),
    )


def _norm(config: ModelConfig, source: Source, size: int | None = None) -> RMSNorm:
    return RMSNorm(source, size or config.hidden_size, config.rms_norm_eps, offset=1.0)


def _kinds(config: ModelConfig) -> tuple[str, ...]:
    if config.layer_types is not None:
        return config.layer_types
    if config.model_type == "gemma":
        return (FULL,) * config.num_layers
    every = config.fields.count("sliding_window_pattern", default=2 if config.model_type == "gemma2" else 6)
    return tuple(FULL if (index + 1) % every == 0 else SLIDING for index in range(config.num_layers))


def _activation(config: ModelConfig) -> str:
    """The first files say "gelu" and mean its approximation, which `hidden_activation` was added to say."""
    given = config.fields.text("hidden_activation")
    return given or ("gelu_pytorch_tanh" if config.hidden_act == "gelu" else config.hidden_act)


def _local_theta(config: ModelConfig) -> float:
    own = (config.rope_scaling or {}).get(SLIDING)
    if isinstance(own, dict) and own.get("rope_theta"):
        return own["rope_theta"]
    return config.fields.number("rope_local_base_freq", default=LOCAL_THETA)
