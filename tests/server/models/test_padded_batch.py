"""Joined caches: every row keeps its own tokens, whoever it shares them with."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from tgi.server.models.padded_batch import Batch, Part, can_join, length_class, mask_of, prompt_width, together

CPU = torch.device("cpu")


def cache_of(begin: int, length: int, num_layers: int = 2) -> DynamicCache:
    """One row, whose tokens are numbered."""
    cache = DynamicCache()
    for layer in range(num_layers):
        tokens = torch.arange(begin, begin + length, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 3)
        cache.update(tokens, -tokens, layer)
    return cache


def append(batch: Batch, tokens: list[int]) -> None:
    for layer in range(2):
        new = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 2, 1, 3)
        batch.cache.update(new, -new, layer)


def rows_of(cache: Cache, layer: int = 1) -> list[list[float]]:
    found = cache.layers[layer]
    assert isinstance(found, DynamicLayer)
    keys, values = found.keys, found.values
    assert keys is not None
    assert values is not None
    assert torch.equal(keys, -values)
    return keys[:, 0, :, 0].tolist()


def test_a_batch_stays_while_its_rows_do_and_is_cut_and_joined_when_they_do_not() -> None:
    alone = [Batch(cache_of(begin, length), [0], [0]) for begin, length in ((10, 2), (20, 4), (30, 1))]
    batch = together([Part(alone[0], 0, 2), Part(alone[1], 0, 4)])
    assert batch.pads == [2, 0]
    assert rows_of(batch.cache) == [[0, 0, 10, 11], [20, 21, 22, 23]]
    append(batch, [12, 24])
    assert together([Part(batch, 0, 3), Part(batch, 1, 5)]) is batch

    run_again = together([Part(batch, 0, 2), Part(batch, 1, 4)])
    assert rows_of(run_again.cache) == [[0, 0, 10, 11], [20, 21, 22, 23]]
    assert rows_of(alone[0].cache) == [[10, 11]]

    without = together([Part(batch, 0, 3)])
    assert (without.pads, rows_of(without.cache)) == ([0], [[10, 11, 12]])
    joined = together([Part(batch, 1, 4), Part(alone[2], 0, 1), Part(without, 0, 3)])
    assert rows_of(joined.cache) == [[20, 21, 22, 23], [0, 0, 0, 30], [0, 10, 11, 12]]
    assert mask_of(joined.pads, 4, CPU).tolist() == [[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]


def test_a_step_that_failed_in_the_middle_of_its_layers_is_cut_off() -> None:
    alone = [Batch(cache_of(begin, length), [0], [0]) for begin, length in ((10, 2), (20, 4))]
    batch = together([Part(alone[0], 0, 2), Part(alone[1], 0, 4)])
    new = torch.full((2, 2, 1, 3), 99.0)
    batch.cache.update(new, -new, 0)
    again = together([Part(batch, 0, 2), Part(batch, 1, 4)])
    assert again is not batch
    assert rows_of(again.cache, 0) == rows_of(again.cache, 1) == [[0, 0, 10, 11], [20, 21, 22, 23]]


def test_what_a_decoder_sees_of_its_prompts_is_padded_by_itself() -> None:
    alone = [
        Batch(EncoderDecoderCache(cache_of(0, answered), cache_of(begin, length)), [0], [0])
        for answered, begin, length in ((3, 10, 2), (1, 20, 4))
    ]
    batch = together([Part(alone[0], 0, 3), Part(alone[1], 0, 1)])
    assert (batch.pads, batch.prompt_pads, prompt_width(batch)) == ([0, 2], [2, 0], 4)
    assert rows_of(batch.cache.cross_attention_cache) == [[0, 0, 10, 11], [20, 21, 22, 23]]
    alone_again = together([Part(batch, 0, 2)])
    assert rows_of(alone_again.cache.self_attention_cache) == [[0, 1]]
    assert rows_of(alone_again.cache.cross_attention_cache) == [[10, 11]]
    assert alone_again.cache.is_updated == {0: True, 1: True}


def test_only_keys_and_values_of_whole_texts_are_joined() -> None:
    sliding = cache_of(0, 4)
    sliding.layers[1] = DynamicSlidingWindowLayer(sliding_window=2)
    assert can_join(cache_of(0, 4))
    assert not can_join(sliding)
    assert not can_join(EncoderDecoderCache(cache_of(0, 4), sliding))
    assert not can_join(object())


def test_padding_no_more_than_doubles_a_batch_of_long_rows() -> None:
    lengths = range(64, 5000)
    assert all(length_class(length) != length_class(2 * length) for length in lengths)
    assert len({length_class(length) for length in range(1, 128)}) == 1
