"""GPT-J: attention and MLP beside each other on one norm, interleaved rotation of part of a head, biased head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.errors import StartupError
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import ParallelLayer
from tgi.server.layers.decoder import FULL, Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import MLP
from tgi.server.layers.norm import LayerNorm
from tgi.server.layers.rotary import rotary_of
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
EPS = 1e-5
ROTATED = 64  # elements of a head, where a configuration does not say


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source, "transformer", "wte.weight")
    embedding = Embedding(body.at("wte"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, body.at(f"h.{index}"), index) for index in range(config.num_layers)]
    rotated = config.fields.count("rotary_dim", default=ROTATED)
    if rotated > config.head_dim:
        raise StartupError(f"{config.fields.where}: rotary_dim {rotated} is more than a head's {config.head_dim}")
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("ln_f")),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest, dim=rotated, interleaved=True)},
    )


def _layer(config: ModelConfig, source: Source, index: int) -> ParallelLayer:
    attention = Attention(
        source.at("attn"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        out="out_proj",
    )
    mlp = MLP(
        source.at("mlp"),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        up="fc_in",
        down="fc_out",
        bias=True,
    )
    return ParallelLayer(norm=_norm(config, source.at("ln_1")), attention=attention, mlp=mlp)


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, config.fields.number("layer_norm_epsilon", default=EPS))
