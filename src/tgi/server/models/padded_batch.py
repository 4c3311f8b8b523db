"""Caches of transformers that hold several rows: padded, joined, cut, weighed. Knows no model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False, slots=True)
class Batch:
    """Rows that decode together are padded on the left: a row's tokens lie behind its padding, and the ones to come
    behind them, so where a row begins never changes. Rows that were read together are padded on the right, where no
    token looks: such a batch is only cut from."""

    cache: Any  # transformers' own, of whichever kind where there is one row
    pads: list[int]  # by row, on the left
    prompt_lens: list[int]  # by row, in what a decoder looks at of its encoder, padded on the right; 0 without one


@dataclass(frozen=True, slots=True)
class Part:
    """A row of a batch, up to its `length`th token."""

    batch: Batch
    index: int
    length: int


def can_join(cache: Any) -> bool:
    """Nothing but keys and values of whole texts, to which a step only ever appends."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

    kinds = _caches(cache)
    return (len(kinds) == 1 or type(cache) is EncoderDecoderCache) and all(
        type(kind) is DynamicCache and all(type(layer) is DynamicLayer for layer in kind.layers) for kind in kinds
    )


def together(parts: Sequence[Part]) -> Batch:
    """The batch of exactly these rows in this order: the one they are in, or a new one."""
    batch = parts[0].batch
    widths = {layer.keys.shape[2] for layer in _caches(batch.cache)[0].layers}
    is_whole = len(parts) == len(batch.pads) and all(
        part.batch is batch and part.index == index and widths == {batch.pads[index] + part.length}
        for index, part in enumerate(parts)
    )
    return batch if is_whole else _join(parts)


def left_mask(pads: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
    """[rows, width] int64: 0 for padding on the left."""
    begins = torch.tensor(pads, device=device).unsqueeze(1)
    return (torch.arange(width, device=device) >= begins).to(torch.int64)


def right_mask(lens: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
    """[rows, width] int64: 0 for padding on the right."""
    ends = torch.tensor(lens, device=device).unsqueeze(1)
    return (torch.arange(width, device=device) < ends).to(torch.int64)


def right_padded(texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[tokens] each -> [texts, tokens of the longest]"""
    return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)


def prompt_width(batch: Batch) -> int:
    return _caches(batch.cache)[1].layers[0].keys.shape[2]


def cache_bytes(cache: Any) -> int:
    """Memory of all tensors that a cache of whichever kind holds."""
    found: dict[int, int] = {}
    _weigh(cache, found, set())
    return sum(found.values())


def _weigh(part: Any, found: dict[int, int], known: set[int]) -> None:
    """Into `found`: bytes by address, so that what two names share counts once."""
    if id(part) in known:
        return
    known.add(id(part))
    if isinstance(part, torch.Tensor):
        found[part.data_ptr()] = part.numel() * part.element_size()
        return
    if isinstance(part, dict):
        inner: Sequence[Any] = list(part.values())
    elif isinstance(part, (list, tuple)):
        inner = part
    else:
        inner = list(vars(part).values()) if hasattr(part, "__dict__") and not isinstance(part, type) else ()
    for each in inner:
        _weigh(each, found, known)


def _caches(cache: Any) -> list[Any]:
    """The decoder's own, and where there is an encoder the one of what the decoder looks at there."""
    if hasattr(cache, "cross_attention_cache"):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _join(parts: Sequence[Part]) -> Batch:
    caches = [_caches(part.batch.cache) for part in parts]
    begins = [part.batch.pads[part.index] for part in parts]
    lens = [part.length for part in parts]
    own = _join_layers(parts, [kinds[0] for kinds in caches], begins, lens, to_the_right=True)
    pads = [max(lens) - length for length in lens]
    prompt_lens = [part.batch.prompt_lens[part.index] for part in parts]
    if len(caches[0]) == 1:
        return Batch(own, pads, prompt_lens)
    cross = _join_layers(parts, [kinds[1] for kinds in caches], [0] * len(parts), prompt_lens, to_the_right=False)
    joined = copy.copy(parts[0].batch.cache)
    joined.self_attention_cache, joined.cross_attention_cache = own, cross
    joined.is_updated = dict(joined.is_updated)
    return Batch(joined, pads, prompt_lens)


def _join_layers(
    parts: Sequence[Part], caches: Sequence[Any], begins: Sequence[int], lens: Sequence[int], to_the_right: bool
) -> Any:
    """A cache of the given stretch of each part, at the right end of its row or at the left."""
    longest = max(lens)
    firsts = [longest - length if to_the_right else 0 for length in lens]
    joined = copy.copy(caches[0])
    joined.layers = [copy.copy(layer) for layer in joined.layers]
    for number, layer in enumerate(joined.layers):
        for name in ("keys", "values"):
            like = getattr(layer, name)  # [rows, heads, tokens, dim]
            whole = like.new_zeros(len(parts), like.shape[1], longest, like.shape[3])
            stretches = zip(parts, caches, begins, firsts, lens, strict=True)
            for place, (part, cache, begin, first, length) in enumerate(stretches):
                source = getattr(cache.layers[number], name)
                whole[place, :, first : first + length] = source[part.index, :, begin : begin + length]
            setattr(layer, name, whole)
    return joined
