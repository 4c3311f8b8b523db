"""BLOOM: linear biases instead of positions, a norm behind the embedding, one tensor for queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def Model(config: ModelConfig, source: Source, longest: int | None = None) -> Decoder:
    body = body_of(source, "transformer", "word_embeddings.weight")
    embedding = Embedding(body.at("word_embeddings"), config.vocab_size, config.hidden_size)
    layers = [_layer(config, body.at(f"h.{index}"), index) for index in range(config.num_layers)]
    return Decoder(
        source,
        embedding=embedding,
        layers=layers,
        norm=_norm(config, body.at("ln_f")),
        head=head_of(config, source, embedding),
        cache_shape=cache_shape([layer.attention for layer in layers]),
        embedding_norm=_norm(config, body.at("word_embeddings_layernorm")),
    )


def _layer(config: ModelConfig, source: Source, index: int) -> SequentialLayer:
    attention = Attention(
        source.at("self_attention"),
        index,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=True,
        output_bias=True,
        qkv="query_key_value",
        out="dense",
        grouped=True,
        alibi=alibi_slopes(config.num_heads),
    )
    mlp = MLP(
        source.at("mlp"),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        bias=True,
    )
    return SequentialLayer(
        norm=_norm(config, source.at("input_layernorm")),
        attention=attention,
        mlp_norm=_norm(config, source.at("post_attention_layernorm")),
        mlp=mlp,
        normed_stream=config.fields.flag("apply_residual_connection_post_layernorm"),
    )


def _norm(config: ModelConfig, source: Source) -> LayerNorm:
    return LayerNorm(source, config.hidden_size, config.fields.number("layer_norm_epsilon", default=EPS))
