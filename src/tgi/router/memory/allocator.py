"""What every block allocator does, and what a row holds of it.

Plain Python: knows blocks of the KV cache by number, token ids as packed u32 (`bytes`), and nothing of queues or
devices. Block 0 is scratch and is never handed out. Lengths are in tokens unless they say blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tgi.router.memory.moves import Moves
from tgi.router.memory.node import Node
from tgi.router.memory.packed import BLOCK_BYTES


class Allocation:
    """The blocks of one row, by who may write them and who frees them.

        position 0            cached_len          published_len              room
                 │ the tree's,  │ the tree's by now,  │ `private`: the row's,  │
                 │ another row  │ computed by         │ being written,         │
                 │ computed it  │ this row            │ partly still empty     │

    The tree's part is read-only (rule 5), and `node`, which ends at `published_len` and is pinned by this row, keeps it
    alive. When another row has published the same ids first (`is_doubled`), this one publishes nothing more before its
    end: the device goes on reading its private copy, and nobody pins two copies. So a row never holds more blocks than
    its own table has, and one that fits an empty pool always fits when it runs alone.
    """

    __slots__ = ("blocks", "cached_len", "is_doubled", "node", "num_blocks", "private", "published_len")

    def __init__(self, cached_len: int, blocks: bytes, private: bytearray, node: Node | None) -> None:
        self.cached_len = cached_len
        self.blocks = blocks  # all of them as of `allocate`, in order, u32; `grow` returns what comes after
        self.num_blocks = len(blocks) // BLOCK_BYTES
        self.private = private
        self.published_len = cached_len
        self.is_doubled = False
        self.node = node


class Allocator(Protocol):
    """Hands out blocks. No call costs more than the blocks and ids it is about, however large the pool is."""

    block_size: int  # tokens
    num_blocks: int  # block 0 included
    shares: bool  # may `cached_len` be above 0?
    num_evicted: int  # blocks of cached prefixes that had to make room, ever; flushed ones are not counted
    num_host_blocks: int  # where evicted ones may go; 0: they are lost

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        ...

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and those of unused cached prefixes."""
        ...

    @property
    def num_host_used(self) -> int:
        """Blocks of the host that hold evicted prefixes."""
        ...

    @property
    def num_offloaded(self) -> int:
        """Blocks that went to the host, ever; of `num_evicted`."""
        ...

    @property
    def num_returned(self) -> int:
        """Blocks that came back from there, ever."""
        ...

    def allocate(
        self, ids: bytes, num_tokens: int, *, namespace: bytes = b"", read: bool = True, reserve: int = 0
    ) -> Allocation | None:
        """Room for `num_tokens` (at least the ids), on top of the longest cached prefix of `ids` when `read`.

        The prefix is looked up among those of `namespace` and is shorter than the ids, so that at least one position is
        computed. None, with nothing evicted, unless `reserve` blocks would stay available besides.
        """
        ...

    def grow(self, allocation: Allocation, num_blocks: int) -> bytes | None:
        """Further blocks at the row's end, u32; None when fewer are available."""
        ...

    def publish(self, allocation: Allocation, ids: bytes, computed_len: int) -> None:
        """Let others read the full blocks below `computed_len`, whose positions hold the first of `ids`."""
        ...

    def free(self, allocation: Allocation, ids: bytes = b"", computed_len: int = 0) -> None:
        """Take everything back, after publishing what was computed. The allocation is dead afterwards."""
        ...

    def flush(self) -> int:
        """Free all blocks of unused cached prefixes. -> how many, those of the host not counted"""
        ...

    def take_moves(self) -> Moves:
        """The copies that all calls since the last one count on, to be made before any row runs that they concern."""
        ...

    def forget(self, moves: Iterable[Moves]) -> None:
        """Nobody knows whether these copies were made: whatever prefix counts on one is dropped. No row may be live."""
        ...

    def check(self, live: Iterable[Allocation]) -> None:
        """AssertionError unless every block is free, cached, or held by exactly one of the `live` allocations."""
        ...
