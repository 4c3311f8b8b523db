"""RadixAllocator against TGI's own values where they are the same, and where sharing begins earlier than there."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest

from tgi.router.memory.allocator import Allocation
from tgi.router.memory.radix import RadixAllocator


def pack(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def blocks_of(allocation: Allocation) -> list[int]:
    return memoryview(allocation.blocks).cast("I").tolist()


def allocate(allocator: RadixAllocator, num_tokens: int, ids: list[int]) -> Allocation:
    allocation = allocator.allocate(pack(ids), num_tokens)
    assert allocation is not None
    return allocation


def test_blocks_of_two() -> None:
    allocator = RadixAllocator(12, 2)
    first = allocate(allocator, 8, [0, 1, 2, 3])
    assert (blocks_of(first), first.cached_len) == ([8, 9, 10, 11], 0)
    allocator.check([first])
    allocator.free(first, pack([0, 1, 2, 3]), 4)
    again = allocate(allocator, 8, [0, 1, 2, 3, 4])
    assert (blocks_of(again), again.cached_len) == ([8, 9, 10, 11], 4)
    allocator.check([again])


def test_only_full_blocks_are_cached() -> None:
    allocator = RadixAllocator(12, 2)
    first = allocate(allocator, 7, [0, 1, 2])
    assert blocks_of(first) == [8, 9, 10, 11]
    allocator.free(first, pack([0, 1, 2]), 3)
    again = allocate(allocator, 7, [0, 1, 2])
    assert again.cached_len == 2


def test_blocks_of_one() -> None:
    allocator = RadixAllocator(12, 1)
    first = allocate(allocator, 8, [0, 1, 2, 3])
    assert blocks_of(first) == [4, 5, 6, 7, 8, 9, 10, 11]
    allocator.free(first, pack([0, 1, 2, 3]), 4)
    again = allocate(allocator, 8, [0, 1, 2, 3, 4])
    assert (blocks_of(again), again.cached_len) == ([4, 5, 6, 7, 8, 9, 10, 11], 4)


def test_a_whole_prompt_in_the_cache_leaves_one_position_to_compute() -> None:
    allocator = RadixAllocator(12, 1)
    allocator.free(allocate(allocator, 4, [0, 1, 2, 3]), pack([0, 1, 2, 3]), 4)
    again = allocate(allocator, 4, [0, 1, 2, 3])
    assert again.cached_len == 3
    wide = RadixAllocator(12, 4)
    wide.free(allocate(wide, 8, [0, 1, 2, 3, 4, 5, 6, 7]), pack(list(range(8))), 8)
    assert allocate(wide, 8, list(range(8))).cached_len == 4


def test_the_oldest_prefix_goes_first() -> None:
    allocator = RadixAllocator(7, 1)
    first = allocate(allocator, 4, [0, 1, 2, 3])
    assert blocks_of(first) == [3, 4, 5, 6]
    second = allocate(allocator, 2, [4, 5])
    assert blocks_of(second) == [1, 2]
    allocator.free(first, pack([0, 1, 2, 3]), 4)
    allocator.free(second, pack([4, 5]), 2)
    third = allocate(allocator, 4, [6, 7, 8, 9])
    assert blocks_of(third) == [3, 4, 5, 6]
    allocator.check([third])


def test_equal_rows_at_once_leave_one_copy() -> None:
    allocator = RadixAllocator(10, 1)
    ids = [0, 1, 2, 3]
    first, second = allocate(allocator, 4, ids), allocate(allocator, 4, ids)
    allocator.free(second, pack(ids), 4)
    allocator.free(first, pack(ids), 4)
    third = allocate(allocator, 5, [*ids, 4])
    assert third.cached_len == 4
    assert allocator.num_free == 4
    allocator.check([third])


def test_overlapping_prompts() -> None:
    allocator = RadixAllocator(20, 1)
    short, one, other = [0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7]
    first, second, third = allocate(allocator, 4, short), allocate(allocator, 6, one), allocate(allocator, 6, other)
    assert [blocks_of(row) for row in (first, second, third)] == [
        [16, 17, 18, 19],
        [10, 11, 12, 13, 14, 15],
        [4, 5, 6, 7, 8, 9],
    ]
    allocator.free(first, pack(short), 2)
    allocator.free(third, pack(other), 6)
    allocator.free(second, pack(one), 6)
    assert allocator.num_free == 11
    found = [allocate(allocator, 7, [*ids, 9]) for ids in (one, other)]
    assert [row.cached_len for row in found] == [6, 6]
    assert [blocks_of(row)[:6] for row in found] == [[16, 17, 6, 7, 14, 15], [16, 17, 6, 7, 8, 9]]
    allocator.check(found)


def test_a_prefix_is_shared_while_its_row_runs() -> None:
    allocator = RadixAllocator(40, 4)
    ids = list(range(20))
    running = allocate(allocator, 24, ids)
    allocator.publish(running, pack(ids), 7)
    assert running.published_len == 4, "whole blocks only"
    allocator.publish(running, pack(ids), 20)
    sharer = allocate(allocator, 24, [*ids[:18], 99, 99])
    assert sharer.cached_len == 16
    assert blocks_of(sharer)[:4] == blocks_of(running)[:4]
    allocator.check([running, sharer])
    allocator.free(running, pack(ids), 20)
    allocator.check([sharer])
    assert allocator.allocate(pack([50] * 160), 160) is None, "what the sharer reads is not given away"
    allocator.check([sharer])


def test_who_is_second_to_publish_keeps_its_own_copy_to_its_end() -> None:
    allocator = RadixAllocator(40, 4)
    ids = list(range(16))
    first, second = allocate(allocator, 16, ids), allocate(allocator, 16, ids)
    allocator.publish(first, pack(ids), 8)
    allocator.publish(second, pack(ids), 12)
    assert (second.is_doubled, second.published_len) == (True, 0)
    assert allocator.num_free == 39 - 8
    allocator.check([first, second])
    allocator.free(first, pack(ids), 8)
    allocator.check([second])
    assert allocator.num_available == 39 - 4, "nobody's copy is kept for a row that does not read it"
    allocator.free(second, pack(ids), 16)
    allocator.check([])
    assert allocate(allocator, 17, [*ids, 1]).cached_len == 16


def test_a_row_alone_can_use_the_whole_pool() -> None:
    """Also when another published the same prompt first: two copies would not fit."""
    allocator = RadixAllocator(11, 4)
    ids = list(range(16))
    first, second = allocate(allocator, 16, ids), allocate(allocator, 16, ids)
    allocator.publish(first, pack(ids), 16)
    allocator.publish(second, pack(ids), 16)
    allocator.free(first, pack(ids), 16)
    assert allocator.grow(second, 6) is not None
    assert allocator.num_available == 0
    allocator.check([second])


def test_what_does_not_fit_evicts_nothing() -> None:
    allocator = RadixAllocator(11, 1)
    cached = list(range(8))
    allocator.free(allocate(allocator, 8, cached), pack(cached), 8)
    assert allocator.allocate(pack([50] * 11), 11) is None
    assert allocator.allocate(pack([50] * 8), 8, reserve=3) is None
    row = allocate(allocator, 9, [*cached, 1])
    assert row.cached_len == 8
    assert allocator.grow(row, 2) is None
    allocator.check([row])


def test_reserve_counts_what_stays_available() -> None:
    allocator = RadixAllocator(11, 1)
    assert allocator.allocate(pack([1] * 8), 8, reserve=3) is None
    assert allocator.allocate(pack([1] * 8), 8, reserve=2) is not None


def test_growth_takes_unused_prefixes() -> None:
    allocator = RadixAllocator(11, 2)
    old = list(range(10))
    allocator.free(allocate(allocator, 10, old), pack(old), 10)
    row = allocate(allocator, 4, [50, 51, 52])
    allocator.publish(row, pack([50, 51, 52]), 3)
    blocks = allocator.grow(row, 6)
    assert blocks is not None
    assert len(blocks) == 6 * 4
    assert row.num_blocks == 8
    allocator.check([row])
    assert allocate(allocator, 4, [*old[:2], 7]).cached_len == 2, "a leaf is cut from its end"


def test_without_reading_nothing_is_found_but_published() -> None:
    allocator = RadixAllocator(40, 2)
    ids = pack([1, 2, 3, 4])
    for _ in range(2):
        row = allocator.allocate(ids, 4, read=False)
        assert row is not None
        assert row.cached_len == 0
        allocator.free(row, ids, 4)
    allocator.check([])
    assert allocate(allocator, 5, [1, 2, 3, 4, 5]).cached_len == 4


def test_flush_leaves_what_rows_use() -> None:
    allocator = RadixAllocator(40, 2)
    used, unused = list(range(8)), list(range(20, 28))
    for ids in (used, unused):
        allocator.free(allocate(allocator, 8, ids), pack(ids), 8)
    row = allocate(allocator, 8, [*used[:4], 90, 91])
    assert row.cached_len == 4
    assert allocator.flush() == 2 + 4
    allocator.check([row])
    assert allocate(allocator, 8, unused).cached_len == 0
    assert allocate(allocator, 8, used).cached_len == 4
    assert allocator.num_evicted == 0


def test_evicted_blocks_are_counted() -> None:
    allocator = RadixAllocator(11, 1)
    ids = list(range(8))
    allocator.free(allocate(allocator, 8, ids), pack(ids), 8)
    row = allocate(allocator, 4, [50] * 4)
    assert allocator.num_evicted == 2
    assert allocator.grow(row, 3) is not None
    assert allocator.num_evicted == 5


def test_blocks_go_to_the_host_in_lots() -> None:
    """A large pool that is full: growing by a block is no copy each time."""
    allocator = RadixAllocator(1_281, 16, num_host_blocks=2_000)
    ids = [*range(1_280 * 16)]
    allocator.free(allocate(allocator, len(ids), ids), pack(ids), len(ids))
    row = allocate(allocator, 16, [50] * 16)
    assert len(allocator.take_moves()) == allocator.num_offloaded == 20
    for _ in range(19):
        assert allocator.grow(row, 1) is not None
    assert len(allocator.take_moves()) == 0
    assert allocator.grow(row, 1) is not None
    assert len(allocator.take_moves()) == 20
    allocator.check([row])


def test_salts_and_adapters_share_nothing() -> None:
    allocator = RadixAllocator(40, 2)
    ids = pack([1, 2, 3, 4, 5])
    for namespace in (b"a", b"b", b""):
        row = allocator.allocate(ids, 5, namespace=namespace)
        assert row is not None
        assert row.cached_len == 0
        allocator.free(row, ids, 5)
        again = allocator.allocate(ids, 5, namespace=namespace)
        assert again is not None
        assert again.cached_len == 4
        allocator.free(again)
    allocator.check([])


def test_check_sees_a_block_in_two_places() -> None:
    allocator = RadixAllocator(12, 2)
    row = allocate(allocator, 4, [1, 2, 3])
    with pytest.raises(AssertionError, match="pins"):
        allocator.check([])
    row.private[:4] = row.private[4:8]
    with pytest.raises(AssertionError, match="lost or in two places"):
        allocator.check([row])


@pytest.mark.fault("TGI#2007")
def test_the_pool_size_does_not_matter() -> None:
    """Bytes allocated by a call, counted, instead of time: a copy of the pool would show."""
    allocator = RadixAllocator(1_000_000, 1)
    ids = pack(list(range(64)))
    allocator.free(allocate(allocator, 80, list(range(64))), ids, 64)
    tracemalloc.start()
    try:
        row = allocator.allocate(ids, 80)
        assert row is not None
        allocator.grow(row, 16)
        allocator.publish(row, ids, 64)
        allocator.free(row, ids, 64)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()
