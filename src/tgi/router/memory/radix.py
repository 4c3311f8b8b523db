"""RadixAllocator: blocks on demand, prefixes shared while their first row still runs, evicted ones kept on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tgi.router.memory.allocator import Allocation
from tgi.router.memory.free_stack import FreeStack
from tgi.router.memory.moves import NONE, Moves
from tgi.router.memory.node import Node
from tgi.router.memory.packed import BLOCK_BYTES, ID_BYTES
from tgi.router.memory.trie import RadixTrie

# Tokens; less than this is computed again rather than brought back from the host. Per token a copy is many times
# cheaper than a forward, but on a GPU every command with copies pays a few launches per layer, in whose time some tens
# of tokens are read. On two CPU cores 64 tokens come back in 0.5 ms and are computed in 62 (135M parameters; 0.06 and
# 1 ms for two small layers): less would do, but its blocks are of 64 tokens, so the limit keeps none of them back.
RETURN_WORTH = 64
# Tokens that go to the host at once, where there is one: growing rows would pay those launches for a block each. Of the
# pool no more than a part, since what is sent ahead could have been found in the cache a little longer.
SPILL_AHEAD, SPILL_PART = 512, 64


class RadixAllocator:
    """See Allocator. A block is in exactly one place: free, in the trie, or private to one row."""

    shares = True

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, return_worth: int | None = None
    ) -> None:
        """`num_host_blocks`: where evicted blocks go. `return_worth`: tokens that must be gained to bring
        some back; None: RETURN_WORTH."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.num_evicted = 0
        self._free = FreeStack(num_blocks)
        self._trie = RadixTrie(block_size, num_host_blocks)
        self._host = self._trie.host
        self._stride = block_size * ID_BYTES
        self._spill_least = min(SPILL_AHEAD // block_size, num_blocks // SPILL_PART) if num_host_blocks else 0
        self._return_worth = (RETURN_WORTH if return_worth is None else return_worth) * ID_BYTES

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_available(self) -> int:
        return self._free.num_free + self._trie.num_unused

    @property
    def num_host_used(self) -> int:
        return 0 if self._host is None else self._host.num_used

    @property
    def num_offloaded(self) -> int:
        return 0 if self._host is None else self._host.num_offloaded

    @property
    def num_returned(self) -> int:
        return 0 if self._host is None else self._host.num_returned

    def allocate(
        self, ids: bytes, num_tokens: int, *, namespace: bytes = b"", read: bool = True, reserve: int = 0
    ) -> Allocation | None:
        assert num_tokens * ID_BYTES >= len(ids) > 0, "room for the ids at least"
        stride = self._stride
        limit = (len(ids) - ID_BYTES) // stride * stride if read else 0
        node, parts = self._trie.acquire(namespace, ids, limit)
        cached_blocks = sum(map(len, parts)) // BLOCK_BYTES
        count = -(-num_tokens // self.block_size) - cached_blocks
        # Pinned above: what this row shares no longer counts as available.
        if count + reserve > self.num_available:
            self._trie.unpin(node)
            return None
        if node.spilled:
            node, returned = self._bring_back(node, ids, cached_blocks * stride, limit)
            parts.append(returned)
            cached_blocks += len(returned) // BLOCK_BYTES
            count -= len(returned) // BLOCK_BYTES
        private = self._take(count)
        blocks = b"".join((*parts, private))
        return Allocation(cached_blocks * self.block_size, blocks, private, node)

    def grow(self, allocation: Allocation, num_blocks: int) -> bytes | None:
        if num_blocks > self.num_available:
            return None
        blocks = self._take(num_blocks)
        allocation.private += blocks
        allocation.num_blocks += num_blocks
        return bytes(blocks)

    def publish(self, allocation: Allocation, ids: bytes, computed_len: int) -> None:
        begin, end = allocation.published_len, computed_len // self.block_size * self.block_size
        if end <= begin or allocation.is_doubled:
            return
        if self._trie.has_next(self._node(allocation), ids, begin * ID_BYTES):
            allocation.is_doubled = True
            return
        self._insert(allocation, ids, begin, end)

    def free(self, allocation: Allocation, ids: bytes = b"", computed_len: int = 0) -> None:
        begin, end = allocation.published_len, computed_len // self.block_size * self.block_size
        if end > begin:
            self._insert(allocation, ids, begin, end)
        self._free.give(allocation.private)
        self._trie.unpin(self._node(allocation))
        allocation.node = None

    def flush(self) -> int:
        if self._host is not None:
            self._host.clear()
        blocks = self._trie.evict(self._trie.num_unused, spill=False)
        self._free.give(blocks)
        return len(blocks) // BLOCK_BYTES

    def take_moves(self) -> Moves:
        return NONE if self._host is None else self._host.take_moves()

    def forget(self, moves: Iterable[Moves]) -> None:
        doubtful: tuple[set[int], set[int]] = set(), set()  # of the cache, of the host
        for some in moves:
            for to_host, target in zip(some.to_host, memoryview(some.targets).cast("I")):
                doubtful[to_host].add(target)
        self._free.give(self._trie.forget(*map(frozenset, doubtful)))

    def check(self, live: Iterable[Allocation]) -> None:
        live = list(live)
        self._trie.check(Counter(allocation.node for allocation in live if allocation.node is not None))
        places = [self._free.snapshot()]
        places += [node.blocks for node in self._trie.nodes()]
        for allocation in live:
            path = self._path_len(allocation)
            assert allocation.published_len == path, f"published {allocation.published_len}, pinned at {path}"
            own = len(allocation.private) // BLOCK_BYTES + path // self.block_size
            assert own == allocation.num_blocks, f"{own} blocks in a row of {allocation.num_blocks}"
            places.append(allocation.private)
        found = sorted(memoryview(b"".join(places)).cast("I"))
        assert found == list(range(1, self.num_blocks)), "a block is lost or in two places"

    def _insert(self, allocation: Allocation, ids: bytes, begin: int, end: int) -> None:
        """Hand the blocks of `begin` to `end` (tokens) to the trie; those that it has already are free at once."""
        assert end * ID_BYTES <= len(ids), "published more than there are ids for"
        assert end <= allocation.num_blocks * self.block_size, "published more than there is room for"
        private = allocation.private
        allocation.node, present = self._trie.insert(
            self._node(allocation), ids, begin * ID_BYTES, end * ID_BYTES, private
        )
        self._free.give(private[: (present // ID_BYTES - begin) // self.block_size * BLOCK_BYTES])
        del private[: (end - begin) // self.block_size * BLOCK_BYTES]
        allocation.published_len = end

    def _bring_back(self, node: Node, ids: bytes, begin: int, limit: int) -> tuple[Node, bytearray]:
        """What the host has of `ids[begin:limit]` (bytes) below `node`, if it is worth a copy, gets blocks of the
        cache, which must be available. -> where it ends, pinned instead of `node`; the blocks."""
        host = self._host
        assert host is not None
        end = host.match(node, ids, begin, limit)
        if end - begin < self._return_worth:
            return node, bytearray()
        # Withheld before blocks are taken: what is evicted for them may push others out of the host, not these.
        withheld = host.withhold(node, ids, begin, end)
        blocks = self._take((end - begin) // self._stride)
        return self._trie.bring_back(node, withheld, blocks), blocks

    def _node(self, allocation: Allocation) -> Node:
        assert allocation.node is not None, "the allocation was freed"
        return allocation.node

    def _take(self, count: int) -> bytearray:
        missing = count - self._free.num_free
        if missing > 0:
            least = self._spill_least
            evicted = self._trie.evict(missing if missing > least else least)
            self.num_evicted += len(evicted) // BLOCK_BYTES
            self._free.give(evicted)
        return self._free.take(count)

    def _path_len(self, allocation: Allocation) -> int:
        """Tokens from the root to the row's node."""
        length, node = 0, self._node(allocation)
        while node.parent is not None:
            length += len(node.key) // ID_BYTES
            node = node.parent
        return length
