"""GPT-2, and what differs from it by names and a flag: learned positions, LayerNorms, a plain MLP.

GPT-BigCode (StarCoder: one key-value head; the first SantaCoder goes by GPT-2's name), GPT-Neo (scores not scaled,
windows in turn with full attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tgi.errors import StartupError
from tgi.server.layers.attention import Attention, cache_shape
from tgi.server.layers.blocks import SequentialLayer
from tgi.server.layers.decoder import Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding, PositionEmbedding
from tgi.server.layers.mlp import MLP
from tgi.server.layers.norm import LayerNorm
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "multi_query": ("q_attn", "kv_attn")}
EPS = 1e-5
LOCAL_WINDOW = 256  # GPT-Neo's, where a configuration does not say
LOCAL_TURNS = [[["global", "local"], 12]]  # likewise


@dataclass(frozen=True, slots=True)
class Traits:
    """What config.json does not say: it follows from the model_type."""

    transposed: bool = False  # weights are kept [in, out]
    attention: str = "attn"
    qkv: str = "c_attn"
    out: str = "c_proj"
    qkv_bias: bool = True


TRAITS: Mapping[str, Traits] = {
    "gpt2": Traits(transposed=True),
    "gpt_bigcode": Traits(),
    "gpt_neo": Traits(attention="attn.attention", qkv="qkv_proj", out="out_proj", qkv_bias=False),
}


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source, "transformer", "wte.weight")
    embedding = Embedding(body.at("wte"), config.vocab_size, config.hidden_size)
    num_positions = config.fields.count("max_position_embeddings", "n_positions")
    layers = [_layer(config, body.at(f"h.{index}"), index) for index in range(config.num_layers)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("ln_f")),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        positions=PositionEmbedding(body.at("wpe"), num_positions, config.hidden_size),
    )


def _layer(config: ModelConfig, source: Source, index: int) -> SequentialLayer:
    traits = TRAITS[config.model_type]
    attention = Attention(
        source.at(traits.attention),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=traits.qkv_bias,
        output_bias=True,
        qkv="multi_query" if config.fields.get("attention_head_type") == "multiquery" else traits.qkv,
        out=traits.out,
        transposed=traits.transposed,
        # With a key-value head for each head BigCode keeps the three of a head together.
        grouped=config.model_type == "gpt_bigcode" and not config.fields.flag("multi_query"),
        scale=_scale(config, index),
        window=_window(config, index),
    )
    mlp = MLP(
        source.at("mlp"),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        up="c_fc",
        down="c_proj",
        bias=True,
        transposed=traits.transposed,
    )
    return SequentialLayer(
        norm=_norm(config, source.at("ln_1")), attention=attention, mlp_norm=_norm(config, source.at("ln_2")), mlp=mlp
    )


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, config.fields.number("layer_norm_epsilon", default=EPS))


def _scale(config: ModelConfig, index: int) -> float:
    if config.model_type == "gpt_neo" or not config.fields.flag("scale_attn_weights", default=True):
        scale = 1.0
    else:
        scale = config.head_dim**-0.5
    return scale / (index + 1) if config.fields.flag("scale_attn_by_inverse_layer_idx") else scale


def _window(config: ModelConfig, index: int) -> int | None:
    if config.model_type != "gpt_neo":
        return None
    turns = config.fields.get("attention_types") or LOCAL_TURNS
    try:
        # [[["global", "local"], 2]] -> global, local, global, local
        kind = [kind for kinds, times in turns for kind in kinds * times][index]
        return {"global": None, "local": config.fields.count("window_size", default=LOCAL_WINDOW)}[kind]
    except (TypeError, ValueError, LookupError) as error:
        raise StartupError(f"{config.fields.where}: attention_types {turns!r} does not fit the layers") from error
