"""MPT: linear biases instead of positions, no other biases, queries, keys and values optionally clipped, a key-value
head for each head, for a group of them or for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.errors import StartupError
from tgi.model_config import Fields
from tgi.server.layers.attention import Attention, alibi_slopes, cache_shape
from tgi.server.layers.blocks import SequentialLayer
from tgi.server.layers.decoder import Decoder, body_of, head_of
from tgi.server.layers.embedding import Embedding
from tgi.server.layers.mlp import MLP
from tgi.server.layers.norm import LayerNorm
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

PACKED: dict[str, tuple[str, ...]] = {}
EPS = 1e-5
MAX_BIAS = 8.0  # of the first head


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    options = _options(config)
    config.fields.only("norm_type", "layernorm", "low_precision_layernorm")
    body = body_of(source, "transformer", "wte.weight")
    embedding = Embedding(body.at("wte"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, options, body.at(f"blocks.{index}"), index) for index in range(config.num_layers)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("norm_f")),
        head=head_of(config, source, embedding, scale=_logit_scale(config)),
        cache_shape=cache_shape([layer.attention for layer in layers]),
    )


def _options(config: ModelConfig) -> Fields:
    """Those of attention."""
    values = config.fields.get("attn_config") or {}
    if not isinstance(values, dict):
        raise StartupError(f"{config.fields.where}: attn_config must be an object, not {values!r}")
    options = Fields(values, f"{config.fields.where}: attn_config")
    if not options.flag("alibi", default=True):
        raise StartupError(f"{options.where}: MPT models without alibi are not supported")
    options.only("qk_ln", False)
    options.only("prefix_lm", False)
    options.only("rope", False)
    options.only("sliding_window_size", -1)
    options.only("attn_type", "multihead_attention", "grouped_query_attention", "multiquery_attention")
    return options


def _layer(config: ModelConfig, options: Fields, source: Source, index: int) -> SequentialLayer:
    attention = Attention(
        source.at("attn"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv="Wqkv",
        out="out_proj",
        scale=options.optional_number("softmax_scale"),
        alibi=alibi_slopes(config.num_heads, options.number("alibi_bias_max", default=MAX_BIAS)),
        clip=options.optional_number("clip_qkv"),
    )
    mlp = MLP(source.at("ffn"), config.hidden_size, config.intermediate_size, "gelu")
    return SequentialLayer(
        norm=_norm(config, source.at("norm_1")),
        attention=attention,
        mlp_norm=_norm(config, source.at("norm_2")),
        mlp=mlp,
    )


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    eps = config.fields.number("layer_norm_epsilon", default=EPS)
    return LayerNorm(source, config.hidden_size, eps, bias=source.has("bias"))


def _logit_scale(config: ModelConfig) -> float:
    """A number, or a word for one that follows from the size."""
    if config.fields.get("logit_scale") == "inv_sqrt_d_model":
        return config.hidden_size**-0.5
    return config.fields.number("logit_scale", default=1.0)
