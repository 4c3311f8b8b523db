"""Joined caches: every row keeps its own tokens, whoever it shares them with."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from tgi.server.models.padded_batch import (
    Batch,
    Part,
    cache_bytes,
    can_join,
    left_mask,
    prompt_width,
    right_mask,
    right_padded,
    together,
)

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
    assert left_mask(joined.pads, 4, CPU).tolist() == [[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]


def test_a_step_that_failed_in_the_middle_of_its_layers_is_cut_off() -> None:
    alone = [Batch(cache_of(begin, length), [0], [0]) for begin, length in ((10, 2), (20, 4))]
    batch = together([Part(alone[0], 0, 2), Part(alone[1], 0, 4)])
    new = torch.full((2, 2, 1, 3), 99.0)
    batch.cache.update(new, -new, 0)
    again = together([Part(batch, 0, 2), Part(batch, 1, 4)])
    assert again is not batch
    assert rows_of(again.cache, 0) == rows_of(again.cache, 1) == [[0, 0, 10, 11], [20, 21, 22, 23]]


def test_rows_that_were_read_together_are_cut_out_of_what_is_padded_on_the_right() -> None:
    tokens = right_padded([torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0, 22.0, 23.0])])
    assert tokens.tolist() == [[10, 11, 0, 0], [20, 21, 22, 23]]
    cache = DynamicCache()
    for layer in range(2):
        cache.update(tokens.view(2, 1, 4, 1).expand(2, 2, 4, 3), -tokens.view(2, 1, 4, 1).expand(2, 2, 4, 3), layer)
    read = Batch(cache, [0, 0], [0, 0])
    batch = together([Part(read, 0, 2), Part(read, 1, 4)])
    assert (batch.pads, rows_of(batch.cache)) == ([2, 0], [[0, 0, 10, 11], [20, 21, 22, 23]])
    first = together([Part(read, 0, 2)])
    assert (first.pads, rows_of(first.cache)) == ([0], [[10, 11]])


def test_what_a_decoder_sees_of_its_prompts_is_padded_on_the_right() -> None:
    alone = [
        Batch(EncoderDecoderCache(cache_of(0, answered), cache_of(begin, length)), [0], [length])
        for answered, begin, length in ((3, 10, 2), (1, 20, 4))
    ]
    batch = together([Part(alone[0], 0, 3), Part(alone[1], 0, 1)])
    assert (batch.pads, batch.prompt_lens, prompt_width(batch)) == ([0, 2], [2, 4], 4)
    assert right_mask(batch.prompt_lens, 4, CPU).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert rows_of(batch.cache.cross_attention_cache) == [[10, 11, 0, 0], [20, 21, 22, 23]]
    alone_again = together([Part(batch, 0, 2)])
    assert rows_of(alone_again.cache.self_attention_cache) == [[0, 1]]
    assert rows_of(alone_again.cache.cross_attention_cache) == [[10, 11]]
    assert alone_again.cache.is_updated == {0: True, 1: True}


def test_a_cache_weighs_what_its_tensors_take() -> None:
    each = 2 * 2 * 3 * 4  # keys and values, heads, their size, float32
    assert cache_bytes(cache_of(0, 5)) == 2 * 5 * each
    assert cache_bytes(EncoderDecoderCache(cache_of(0, 5), cache_of(0, 7))) == 2 * 12 * each
    states = [torch.zeros(3, 4), torch.zeros(5)]
    assert cache_bytes({"states": states, "again": tuple(states), "number": 3}) == 17 * 4


class Stateful(DynamicCache):
    """With more than its layers tell, as hybrid models have."""


def test_only_keys_and_values_of_whole_texts_are_joined() -> None:
    sliding = cache_of(0, 4)
    sliding.layers[1] = DynamicSlidingWindowLayer(sliding_window=2)
    assert can_join(cache_of(0, 4))
    assert can_join(EncoderDecoderCache(cache_of(0, 4), cache_of(0, 4)))
    assert not can_join(sliding)
    assert not can_join(EncoderDecoderCache(cache_of(0, 4), sliding))
    assert not can_join(Stateful())
    assert not can_join(object())
