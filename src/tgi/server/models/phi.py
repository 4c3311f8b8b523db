"""Phi-1, 1.5 and 2: attention and MLP beside each other on one norm, part of a head rotated, biases, the head's too.

Under its first name (phi-msft) the same model with other names in its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
ROTATED = 0.5  # of a head, where a configuration does not say


@dataclass(frozen=True, slots=True)
class Names:
    """Of the checkpoint's modules."""

    body: str
    embedding: str
    layers: str
    norm: str
    attention: str
    qkv: str
    out: str
    head: str  # from the root


NAMES: Mapping[str, Names] = {
    "phi": Names(
        body="model",
        embedding="embed_tokens",
        layers="layers",
        norm="input_layernorm",
        attention="self_attn",
        qkv="qkv_proj",
        out="dense",
        head="lm_head",
    ),
    "phi-msft": Names(
        body="transformer",
        embedding="embd.wte",
        layers="h",
        norm="ln",
        attention="mixer",
        qkv="Wqkv",
        out="out_proj",
        head="lm_head.linear",
    ),
}


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    names = NAMES[config.model_type]
    body = body_of(source, names.body, f"{names.embedding}.weight")
    embedding = Embedding(body.at(names.embedding), config.vocab_size, config.hidden_size)
    places = [body.at(f"{names.layers}.{index}") for index in range(config.num_layers)]
    layers = [_layer(config, names, place, index) for index, place in enumerate(places)]
    last = source.at("lm_head.ln") if config.model_type == "phi-msft" else body.at("final_layernorm")
    share = int(config.head_dim * (config.partial_rotary_factor or ROTATED))
    rotated = config.fields.count("rotary_dim", default=share)
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, last, config.hidden_size),
        head=head_of(config, source, embedding, name=names.head),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        rotaries={FULL: rotary_of(config, source, longest, dim=rotated)},
    )


def _layer(config: ModelConfig, names: Names, source: Source, index: int) -> ParallelLayer:
    place = source.at(names.attention)
    attention = Attention(
        place,
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=True,
        output_bias=True,
        qkv=names.qkv,
        out=names.out,
    )
    if config.fields.flag("qk_layernorm"):
        attention.query_norm = _norm(config, place.at("q_layernorm"), config.head_dim)
        attention.key_norm = _norm(config, place.at("k_layernorm"), config.head_dim)
    mlp = MLP(
        source.at("mlp"),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        up="fc1",
        down="fc2",
        bias=True,
    )
    norm = _norm(config, source.at(names.norm), config.hidden_size)
    return ParallelLayer(norm=norm, attention=attention, mlp=mlp)


def _norm(config: ModelConfig, source: Source, size: int) -> LayerNorm:
    return LayerNorm(source, size, config.fields.number("layer_norm_eps", "layer_norm_epsilon", default=EPS))
