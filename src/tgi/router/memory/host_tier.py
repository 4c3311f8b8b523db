"""HostTier: what eviction takes out of the KV cache lies here, in host memory, until it is wanted again or too old.

Knows the spilled nodes of one trie, the host's blocks by number (from 0) and which copies the shard has to make for
them. Knows no rows; whose turn it is to be evicted is decided in the trie, and what is worth a copy in the allocator.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from tgi.router.memory.free_stack import FreeStack
from tgi.router.memory.moves import NONE, Moves
from tgi.router.memory.node import Node, first_of, shared_len
from tgi.router.memory.packed import BLOCK_BYTES


class HostTier:
    """Spilled nodes, the least recently used first in `_order`, where a node always stands behind its children.

    Every change of place is written down as a move in the order in which it was decided: a block may be given away, in
    the cache as here, as soon as the move out of it is written down (rule 1).
    """

    def __init__(self, num_blocks: int, stride: int, drop_root: Callable[[Node], None]) -> None:
        """`stride`: bytes of ids per block. `drop_root` is told of a root that may have lost its last node."""
        self.num_blocks = num_blocks
        self.num_offloaded = 0  # blocks, ever
        self.num_returned = 0
        self._stride = stride
        self._drop_root = drop_root
        self._free = FreeStack(num_blocks, first=0)
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._to_host, self._sources, self._targets = bytearray(), bytearray(), bytearray()

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._free.num_free

    def take_moves(self) -> Moves:
        """What has to be copied since the last call."""
        if not self._to_host:
            return NONE
        moves = Moves(bytes(self._to_host), bytes(self._sources), bytes(self._targets))
        self._to_host, self._sources, self._targets = bytearray(), bytearray(), bytearray()
        return moves

    # -- out of the cache ----------------------------------------------------------------------------------------------

    def spill(self, node: Node, keep: int) -> None:
        """Keep what an unused `node`, the last of its path in the cache, loses: its blocks from byte `keep` on.

        The oldest make room. Where there is less room than blocks, those behind it are lost: a tail without what stands
        before it is of no use.
        """
        wanted = len(node.blocks) - keep
        size = min(wanted, self._make_room(wanted // BLOCK_BYTES) * BLOCK_BYTES)
        if not size:
            return
        blocks = node.blocks[keep : keep + size]
        key = node.key[self._ids(keep) : self._ids(keep + size)]
        hosted = self._free.take(size // BLOCK_BYTES)
        self._move(True, blocks, hosted)
        self.num_offloaded += size // BLOCK_BYTES
        below, node.spilled = node.spilled, {}  # none where it was too small: all have made room
        parent = node if keep else node.parent
        assert parent is not None
        newest = next(reversed(self._order), None)
        if len(below) == 1 and newest is not None and newest.parent is node:
            # The same leaf was cut just before: it stays one node, however small the pieces.
            newest.key[:0] = key
            newest.blocks[:0] = hosted
            spilled = newest
        else:
            spilled = Node(key, hosted, None)
            spilled.spilled = below
            for child in below.values():
                child.parent = spilled
            self._order[spilled] = None
        spilled.parent = parent
        parent.spilled[bytes(key[: self._stride])] = spilled

    def _make_room(self, count: int) -> int:
        """Drop the least recently used, from a leaf's end, until `count` blocks are free or nothing is left. -> free"""
        while (missing := count - self._free.num_free) > 0 and self._order:
            leaf = next(iter(self._order))
            self._cut(leaf, max(0, len(leaf.blocks) - missing * BLOCK_BYTES))
        return self._free.num_free

    # -- back into the cache -------------------------------------------------------------------------------------------

    def match(self, node: Node, ids: bytes, begin: int, end: int) -> int:
        """Up to where `ids[begin:end]` (bytes) are here, below `node`, which ends at `begin`."""
        while begin < end:
            child = node.spilled.get(ids[begin : begin + self._stride])
            if child is None:
                break
            agreed = shared_len(ids, begin, end, child.key, self._stride)
            begin += agreed
            if agreed < len(child.key):
                break
            node = child
        return begin

    def withhold(self, node: Node, ids: bytes, begin: int, end: int) -> list[Node]:
        """The nodes of exactly `ids[begin:end]`, which `match` has found, from above. They will not be dropped: every
        one of them is to be released next."""
        path: list[Node] = []
        while begin < end:
            node = node.spilled[ids[begin : begin + self._stride]]
            if len(node.key) > end - begin:
                node = self._split(node, end - begin)
            else:
                del self._order[node]
            begin += len(node.key)
            path.append(node)
        return path

    def release(self, node: Node, target: bytes | bytearray | None) -> None:
        """The blocks of a withheld node are free again, copied back to `target` first unless that has the same."""
        if target is not None:
            self._move(False, node.blocks, target)
            self.num_returned += len(target) // BLOCK_BYTES
        self._free.give(node.blocks)

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` at `length` bytes of its key. -> the upper half, which is withheld."""
        parent = node.parent
        assert parent is not None
        cut = length // self._stride * BLOCK_BYTES
        upper = Node(node.key[:length], node.blocks[:cut], parent)
        parent.spilled[bytes(upper.key[: self._stride])] = upper
        node.key, node.blocks, node.parent = node.key[length:], node.blocks[cut:], upper
        upper.spilled[bytes(node.key[: self._stride])] = node
        return upper

    # -- forgetting ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        self._make_room(self.num_blocks)

    def drop_below(self, node: Node) -> None:
        """`node` is about to leave the trie, with everything that hangs below it."""
        below = list(_subtree(node.spilled))
        for spilled in reversed(below):
            self._cut(spilled, 0)

    def forget(self, blocks: frozenset[int]) -> None:
        """Drop what lies in one of these blocks, and all below it."""
        for node in [*reversed(self._order)]:  # parents first
            if node in self._order and (keep := first_of(node.blocks, blocks)) < len(node.blocks):
                self.drop_below(node)
                self._cut(node, keep)

    def _cut(self, leaf: Node, keep: int) -> None:
        """Drop the blocks of `leaf` from byte `keep` on."""
        assert not leaf.spilled, "a node stands before its children"
        self._free.give(leaf.blocks[keep:])
        if keep:
            del leaf.blocks[keep:]
            del leaf.key[self._ids(keep) :]
            return
        del self._order[leaf]
        parent = leaf.parent
        assert parent is not None
        del parent.spilled[bytes(leaf.key[: self._stride])]
        if parent.parent is None:
            self._drop_root(parent)

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _ids(self, num_bytes: int) -> int:
        """Bytes of ids for bytes of blocks."""
        return num_bytes // BLOCK_BYTES * self._stride

    def _move(self, to_host: bool, sources: bytes | bytearray, targets: bytes | bytearray) -> None:
        self._to_host += bytes([to_host]) * (len(sources) // BLOCK_BYTES)
        self._sources += sources
        self._targets += targets

    def check(self, owners: Iterator[Node]) -> None:
        """AssertionError unless the nodes below the `owners`, which lie in the cache, are sound and all there are."""
        nodes: list[Node] = []
        for owner in owners:
            for first, child in owner.spilled.items():
                assert first not in owner.children, "the same ids are in the cache and spilled"
                assert child.parent is owner, "a spilled node hangs at the wrong place"
            nodes.extend(_subtree(owner.spilled))
        place = {node: index for index, node in enumerate(self._order)}
        assert set(place) == set(nodes), "the order of eviction lacks or has a spilled node too much"
        for node, index in place.items():
            assert (node.children, node.held, node.pins) == ({}, 0, 0), "a spilled node is in use"
            assert len(node.key) == self._ids(len(node.blocks)) > 0, "key and blocks differ"
            for first, child in node.spilled.items():
                assert (child.parent, child.key[: self._stride]) == (node, first), "a child hangs at the wrong place"
                assert place[child] < index, "a node stands before its children"
        found = sorted(memoryview(b"".join([self._free.snapshot(), *(node.blocks for node in place)])).cast("I"))
        assert found == list(range(self.num_blocks)), "a block of the host is lost or in two places"


def _subtree(spilled: dict[bytes, Node]) -> Iterator[Node]:
    """Every node below, parents first."""
    stack = list(spilled.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.spilled.values())
