"""Embeddings and output head, split over the vocabulary; one that the ranks cannot share evenly is whole on each."""

from __future__ import annotations

import torch

from tgi.server.layers.source import Source
from tgi.server.quantization.scheme import Part


class Embedding:
    def __init__(self, source: Source, vocab_size: int, hidden_size: int) -> None:
        self.vocab_size = vocab_size
        self.own = own_ids(source, vocab_size)
        self.weight = source.tensor("weight", (vocab_size, hidden_size), (self.own,))
        self._group = source.group

    @property
    def is_split(self) -> bool:
        return self.weight.shape[0] < self.vocab_size

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], a tensor of the caller's own."""
        if not self.is_split:
            return torch.nn.functional.embedding(input_ids, self.weight)
        rows = input_ids - self.own.start
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        found = torch.nn.functional.embedding(rows.masked_fill_(elsewhere, 0), self.weight)
        return self._group.all_reduce_(found.masked_fill_(elsewhere.unsqueeze(-1), 0))


class PositionEmbedding:
    """A learned vector per position, whole on every rank."""

    def __init__(self, source: Source, num_positions: int, hidden_size: int, offset: int = 0) -> None:
        """Row `offset` of the table is that of position 0; `num_positions` counts the positions, not the rows."""
        self.count = num_positions
        self._offset = offset
        self.weight = source.tensor("weight", (num_positions + offset, hidden_size))

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]"""
        return torch.nn.functional.embedding(positions + self._offset if self._offset else positions, self.weight)


class Head:
    """Hidden states -> logits of the whole vocabulary, float32, on every rank."""

    def __init__(
        self,
        source: Source,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied_to: Embedding | None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """`tied_to`: the embedding whose weight this is. `scale` multiplies the logits; `softcap` bounds them."""
        self._scale = scale
        self._softcap = softcap
        own = own_ids(source, vocab_size)
        self._group = source.group if own.stop - own.start < vocab_size else None
        if tied_to is not None:
            self._kernel = source.matrix(tied_to.weight, float_out=True)
        else:
            place = source.at(name)
            part = Part(place.prefix, (vocab_size, hidden_size), own, slice(0, hidden_size), place.has("bias"))
            self._kernel = source.linear([part], float_out=True)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] float32."""
        logits = self._kernel(hidden)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits if self._group is None else self._group.all_gather(logits)


def own_ids(source: Source, vocab_size: int) -> slice:
    """Token ids whose rows this rank keeps."""
    if vocab_size % source.group.world_size:
        return slice(0, vocab_size)
    return source.share(vocab_size, "token ids")
