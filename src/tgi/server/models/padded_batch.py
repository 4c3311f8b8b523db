"""Caches of transformers that hold several rows: padded on the left, joined, cut. Knows no model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALIKE = 64  # tokens: rows shorter than twice this all share a batch


@dataclass(eq=False, slots=True)
class Batch:
    """A row's tokens lie behind its padding, and the ones to come behind them: where a row begins never changes."""

    cache: Any  # transformers' own, of whichever kind where there is one row
    pads: list[int]  # by row
    prompt_pads: list[int]  # by row, in what a decoder looks at of its encoder; empty without one


@dataclass(frozen=True, slots=True)
class Part:
    """A row of a batch, up to its `length`th token."""

    batch: Batch
    index: int
    length: int


def can_join(cache: Any) -> bool:
    """Nothing but keys and values of whole texts, to which a step only ever appends."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for kind in _caches(cache) for layer in getattr(kind, "layers", (None,)))


def length_class(length: int) -> int:
    """Rows of one class may share a batch: padding does not double one whose rows have ALIKE tokens or more."""
    return max(length, ALIKE).bit_length()


def together(parts: Sequence[Part]) -> Batch:
    """The batch of exactly these rows in this order: the one they are in, or a new one."""
    batch = parts[0].batch
    widths = {layer.keys.shape[2] for layer in _caches(batch.cache)[0].layers}
    is_whole = len(parts) == len(batch.pads) and all(
        part.batch is batch and part.index == index and widths == {batch.pads[index] + part.length}
        for index, part in enumerate(parts)
    )
    return batch if is_whole else _join(parts)


def mask_of(pads: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
    """[rows, width] int64: 0 for padding."""
    begins = torch.tensor(pads, device=device).unsqueeze(1)
    return (torch.arange(width, device=device) >= begins).to(torch.int64)


def prompt_width(batch: Batch) -> int:
    return _caches(batch.cache)[1].layers[0].keys.shape[2]


def _caches(cache: Any) -> list[Any]:
    """The decoder's own, and where there is an encoder the one of what the decoder looks at there."""
    if hasattr(cache, "cross_attention_cache"):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _join(parts: Sequence[Part]) -> Batch:
    caches = [_caches(part.batch.cache) for part in parts]
    begins = [part.batch.pads[part.index] for part in parts]
    own, pads = _join_layers(parts, [kinds[0] for kinds in caches], begins, [part.length for part in parts])
    if len(caches[0]) == 1:
        return Batch(own, pads, [])
    begins = [part.batch.prompt_pads[part.index] for part in parts]
    lens = [prompt_width(part.batch) - begin for part, begin in zip(parts, begins, strict=True)]
    cross, prompt_pads = _join_layers(parts, [kinds[1] for kinds in caches], begins, lens)
    joined = copy.copy(parts[0].batch.cache)
    joined.self_attention_cache, joined.cross_attention_cache = own, cross
    joined.is_updated = dict(joined.is_updated)
    return Batch(joined, pads, prompt_pads)


def _join_layers(
    parts: Sequence[Part], caches: Sequence[Any], begins: Sequence[int], lens: Sequence[int]
) -> tuple[Any, list[int]]:
    """A cache of the given stretch of each part, and how far each is padded in it."""
    longest = max(lens)
    joined = copy.copy(caches[0])
    joined.layers = [copy.copy(layer) for layer in joined.layers]
    for number, layer in enumerate(joined.layers):
        for name in ("keys", "values"):
            like = getattr(layer, name)  # [rows, heads, tokens, dim]
            whole = like.new_zeros(len(parts), like.shape[1], longest, like.shape[3])
            for place, (part, cache, begin, length) in enumerate(zip(parts, caches, begins, lens, strict=True)):
                source = getattr(cache.layers[number], name)
                whole[place, :, longest - length :] = source[part.index, :, begin : begin + length]
            setattr(layer, name, whole)
    return joined, [longest - length for length in lens]
