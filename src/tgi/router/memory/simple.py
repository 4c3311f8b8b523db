"""SimpleAllocator: blocks on demand from a free list. Nothing is shared."""

from __future__ import annotations

from collections.abc import Iterable

from tgi.router.memory.allocator import Allocation
from tgi.router.memory.free_stack import FreeStack
from tgi.router.memory.moves import NONE, Moves
from tgi.router.memory.packed import BLOCK_BYTES, ID_BYTES


class SimpleAllocator:
    """See Allocator. What `allocate` takes in ids and namespace is ignored, and `publish` does nothing."""

    shares = False
    num_host_blocks = num_host_used = num_offloaded = num_returned = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        self._free = FreeStack(num_blocks)

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_available(self) -> int:
        return self._free.num_free

    def allocate(
        self, ids: bytes, num_tokens: int, *, namespace: bytes = b"", read: bool = True, reserve: int = 0
    ) -> Allocation | None:
        assert num_tokens * ID_BYTES >= len(ids) > 0, "room for the ids at least"
        count = -(-num_tokens // self.block_size)
        if count + reserve > self._free.num_free:
            return None
        private = self._free.take(count)
        return Allocation(0, bytes(private), private, None)

    def grow(self, allocation: Allocation, num_blocks: int) -> bytes | None:
        if num_blocks > self._free.num_free:
            return None
        blocks = self._free.take(num_blocks)
        allocation.private += blocks
        allocation.num_blocks += num_blocks
        return bytes(blocks)

    def publish(self, allocation: Allocation, ids: bytes, computed_len: int) -> None:
        pass  # nobody would find it

    def free(self, allocation: Allocation, ids: bytes = b"", computed_len: int = 0) -> None:
        assert allocation.num_blocks, "freed twice"
        self._free.give(allocation.private)
        allocation.private = bytearray()
        allocation.num_blocks = 0

    def flush(self) -> int:
        return 0

    def take_moves(self) -> Moves:
        return NONE

    def forget(self, moves: Iterable[Moves]) -> None:
        pass

    def check(self, live: Iterable[Allocation]) -> None:
        places = [self._free.snapshot()]
        for allocation in live:
            assert len(allocation.private) == allocation.num_blocks * BLOCK_BYTES, "a row lost or gained a block"
            places.append(bytes(allocation.private))
        found = sorted(memoryview(b"".join(places)).cast("I"))
        assert found == list(range(1, self.num_blocks)), "a block is lost or in two places"
