"""A node of the prefix trie, and how ids are compared along its edge. Knows no order of eviction and no free blocks."""

from __future__ import annotations

from tgi.router.memory.packed import BLOCK_BYTES


class Node:
    """An edge and its lower end. `held` counts own pins and held children: while it is above 0 the node stays.

    Its blocks lie in the KV cache, and so do those of its `children`; those of its `spilled` lie in host memory, and so
    does all that hangs below them. A block of ids leads to one of the two at most. Nobody pins a spilled node.
    """

    __slots__ = ("blocks", "children", "held", "key", "parent", "pins", "spilled")

    def __init__(self, key: bytearray, blocks: bytearray, parent: Node | None) -> None:
        self.key = key  # packed ids; of a root, the namespace
        self.blocks = blocks  # packed, one per block_size ids
        self.children: dict[bytes, Node] = {}  # by their first block of ids
        self.spilled: dict[bytes, Node] = {}  # as well
        self.parent = parent
        self.pins = 0
        self.held = 0


def first_of(blocks: bytearray, wanted: frozenset[int]) -> int:
    """Where in `blocks` (bytes) the first of the `wanted` stands, else their length."""
    with memoryview(blocks) as view, view.cast("I") as numbers:
        for index, block in enumerate(numbers):
            if block in wanted:
                return index * BLOCK_BYTES
    return len(blocks)


def shared_len(ids: bytes, begin: int, end: int, key: bytes | bytearray, stride: int) -> int:
    """Bytes, a multiple of `stride`, up to which `key` and `ids[begin:end]` agree: gallop, then bisect, by memcmp."""
    limit = min(end - begin, len(key)) // stride
    with memoryview(key) as view:
        low, step = 0, 1  # the first `low` blocks agree
        while low < limit:
            high = min(low + step, limit)
            if not ids.startswith(view[low * stride : high * stride], begin + low * stride):
                break
            low, step = high, step * 2
        else:
            return low * stride
        while high - low > 1:  # the blocks up to `high` do not all agree
            middle = (low + high) // 2
            if ids.startswith(view[low * stride : middle * stride], begin + low * stride):
                low = middle
            else:
                high = middle
    return low * stride
