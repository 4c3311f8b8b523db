"""The copies themselves: any sequence of moves leaves what one copy after the other would."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from tgi.server.attention import host_blocks
from tgi.server.attention.host_blocks import HostBlocks, split_runs, stretches
from tgi.server.attention.kv_cache import KVCache, make_kv_cache
from tgi.shard_client.messages import BlockMoves

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 7


def moves(entries: list[tuple[bool, int, int]]) -> BlockMoves:
    return BlockMoves(
        bytes(to_host for to_host, _, _ in entries),
        array("I", [source for _, source, _ in entries]).tobytes(),
        array("I", [target for _, _, target in entries]).tobytes(),
    )


def filled_cache(block_size: int, dtype: torch.dtype, head_dim: int = 3) -> KVCache:
    """Keys and values of different shapes, each block of each layer with a content of its own."""
    cache = make_kv_cache(2, (2, head_dim, block_size), (block_size, 2, 5), NUM_BLOCKS, block_size, dtype, CPU)
    for number, layer in enumerate((*cache.keys, *cache.values)):
        for block in range(NUM_BLOCKS):
            layer[block] = number * 16 + block
    return cache


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staged", [1, 3, 100], ids="{}-at-a-time".format)
def test_as_if_one_by_one(block_size: int, dtype: torch.dtype, staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled_cache(block_size, dtype)
    layers = (*cache.keys, *cache.values)
    bytes_per_block = sum(layer[0].numel() * layer.element_size() for layer in layers)
    monkeypatch.setattr(host_blocks, "STAGING_BYTES", staged * bytes_per_block)
    host = HostBlocks(cache, NUM_HOST_BLOCKS)
    rng = random.Random(block_size)
    expected = [list(layer.clone()) for layer in layers]
    hosted = [[torch.zeros_like(layer[0])] * NUM_HOST_BLOCKS for layer in layers]
    for _ in range(20):
        entries: list[tuple[bool, int, int]] = []
        for _ in range(rng.randrange(1, 12)):
            cached, slot = rng.randrange(1, NUM_BLOCKS), rng.randrange(NUM_HOST_BLOCKS)
            to_host = rng.random() < 0.6
            entries.append((True, cached, slot) if to_host else (False, slot, cached))
            for here, there in zip(expected, hosted):
                if to_host:
                    there[slot] = here[cached]
                else:
                    here[cached] = there[slot]
        host.copy(moves(entries))
        for layer, blocks in zip(layers, expected):
            assert torch.equal(layer, torch.stack(blocks))


def test_runs_end_where_the_direction_changes_and_the_last_into_a_target_counts() -> None:
    runs = list(split_runs(moves([(True, 3, 0), (True, 4, 1), (True, 5, 0), (False, 1, 7), (True, 7, 2)])))
    assert [run.to_host for run in runs] == [True, False, True]
    assert [run.sources.tolist() for run in runs] == [[4, 5], [1], [7]]
    assert [run.targets.tolist() for run in runs] == [[1, 0], [7], [2]]
    assert list(split_runs(BlockMoves())) == []


def test_neighbours_on_the_host_are_one_copy() -> None:
    (run,) = split_runs(moves([(True, 9, 4), (True, 2, 5), (True, 8, 6), (True, 1, 0), (True, 3, 2)]))
    assert list(stretches(run.targets)) == [(0, 4, 3), (3, 0, 1), (4, 2, 1)]
