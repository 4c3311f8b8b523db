"""The outside that decoders share: embed, run the layers, norm, head. What a layer does is its family's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from tgi.server.context import CacheShape, ForwardContext
from tgi.server.layers.embedding import Embedding, Head, PositionEmbedding
from tgi.server.layers.norm import Norm
from tgi.server.layers.rotary import Rotary, Rotation
from tgi.server.layers.source import Source

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, in config.json's words
TEXT_PART = "language_model"  # what models of text and images call their decoder
Rotations = Mapping[str, Rotation]  # by kind of layer; a kind that is not there has no positions


class Layer(Protocol):
    def __call__(
        self, update: torch.Tensor | None, residual: torch.Tensor, rotations: Rotations, context: ForwardContext
    ) -> torch.Tensor:
        """Adds the last layer's `update` to `residual` (float32), in place, and its own but for the last part, which it
        returns: the next norm adds that in the pass it makes anyway."""
        ...


class Decoder:
    def __init__(
        self,
        source: Source,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        norm: Norm,
        head: Callable[[torch.Tensor], torch.Tensor],
        cache_shape: CacheShape,
        rotaries: Mapping[str, Rotary] | None = None,
        positions: PositionEmbedding | None = None,
        embedding_norm: Norm | None = None,
        embedding_scale: float = 1.0,
    ) -> None:
        """`rotaries` by kind of layer. `positions`: learned ones, added to the embedding, which `embedding_scale`
        multiplies and `embedding_norm` norms."""
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rotaries = rotaries or {}
        self._positions = positions
        self._embedding_norm = embedding_norm
        self._embedding_scale = embedding_scale
        self.cache_shape = cache_shape if positions is None else replace(cache_shape, max_positions=positions.count)
        self.vocab_size = embedding.vocab_size
        self.weight_bytes = source.kept_bytes

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens] ids and positions -> [tokens, hidden]"""
        residual = self._embedding(input_ids).float()
        if self._embedding_scale != 1.0:
            residual.mul_(self._embedding_scale)
        if self._positions is not None:
            residual.add_(self._positions(positions))
        if self._embedding_norm is not None:
            residual = self._embedding_norm(residual).float()
        rotations = {kind: rotary(positions) for kind, rotary in self._rotaries.items()}
        update = None
        for layer in self._layers:
            update = layer(update, residual, rotations, context)
        return self._norm(residual) if update is None else self._norm.add(update, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        return self._head(hidden)


def entered(norm: Norm, update: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """A layer's input: the norm of the residual stream, the last layer's update added."""
    return norm(residual) if update is None else norm.add(update, residual)


def body_of(source: Source, name: str = "model", inside: str = "embed_tokens.weight") -> Source:
    """Where the decoder is: below `name`, of which a checkpoint that was saved without its head has only the end, or
    nothing; within a model of text and images it may be called so. `inside`: a tensor that it has in any case."""
    parts = name.split(".")
    places = [source.at(".".join(parts[index:])) for index in range(len(parts))]
    places.append(places[0].at(TEXT_PART))
    return next((place for place in (*places, source) if place.has(inside)), places[0])


def head_of(
    config: ModelConfig,
    source: Source,
    embedding: Embedding,
    *,
    name: str = "lm_head",
    size: int | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Head:
    """Files of tied models come without a head, whatever their configuration says. `size`: of what the head reads, if
    not the layers'."""
    tied = config.tie_word_embeddings or source.lacks(f"{name}.weight")
    return Head(
        source,
        name,
        config.vocab_size,
        size or config.hidden_size,
        embedding if tied else None,
        scale=scale,
        softcap=softcap,
    )
