"""SimpleAllocator: a free list, no sharing."""

from __future__ import annotations

from array import array

import pytest

from tgi.router.memory.simple import SimpleAllocator


def pack(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


@pytest.mark.row("D: Simple allocator, block 0 reserved")
def test_the_highest_blocks_go_first_and_block_0_never() -> None:
    allocator = SimpleAllocator(8, 4)
    first = allocator.allocate(pack([1] * 5), 12)
    assert first is not None
    assert memoryview(first.blocks).cast("I").tolist() == [5, 6, 7]
    second = allocator.allocate(pack([1]), 16)
    assert second is not None
    assert memoryview(second.blocks).cast("I").tolist() == [1, 2, 3, 4]
    assert allocator.allocate(pack([1]), 1) is None
    allocator.check([first, second])
    allocator.free(first, pack([1] * 5), 5)
    third = allocator.allocate(pack([1] * 5), 5)
    assert third is not None
    assert (memoryview(third.blocks).cast("I").tolist(), third.cached_len) == ([6, 7], 0)
    allocator.check([second, third])


def test_growth_and_reserve() -> None:
    allocator = SimpleAllocator(8, 4)
    assert allocator.allocate(pack([1]), 8, reserve=6) is None
    row = allocator.allocate(pack([1]), 8, reserve=5)
    assert row is not None
    assert allocator.grow(row, 6) is None
    blocks = allocator.grow(row, 5)
    assert blocks is not None
    assert memoryview(blocks).cast("I").tolist() == [1, 2, 3, 4, 5]
    assert (row.num_blocks, allocator.num_available) == (7, 0)
    allocator.check([row])
    allocator.free(row)
    allocator.check([])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(row)
