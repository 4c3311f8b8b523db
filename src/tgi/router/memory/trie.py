"""The radix trie alone: which blocks hold the KV of which token prefix, who uses them, which go first.

An edge is the packed ids (u32) of whole blocks, compared by slice: the cost per id is that of memcmp. Knows no free
blocks and no rows; a user is a pin on the deepest node of its prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from tgi.router.memory.host_tier import HostTier
from tgi.router.memory.node import Node, first_of, shared_len
from tgi.router.memory.packed import BLOCK_BYTES, ID_BYTES


class RadixTrie:
    """One root per namespace. Nodes in use are never evicted; the others wait in `_unused`, least recently used first.

    Order of `_unused`: letting go of a node adds it behind those below it, and taking it removes its whole path. So a
    node always stands behind its children, and the first one is always a leaf.

    With a host tier, what is evicted becomes a spilled node. Spilled ones hang below all others, so a leaf is a node
    with nothing but spilled ones below it.
    """

    def __init__(self, block_size: int, num_host_blocks: int = 0) -> None:
        self.stride = block_size * ID_BYTES  # bytes of ids per block
        self.host = HostTier(num_host_blocks, self.stride, self._drop_empty_root) if num_host_blocks else None
        self.num_blocks = 0
        self.num_unused = 0  # blocks of the nodes in `_unused`
        self._roots: dict[bytes, Node] = {}
        self._unused: OrderedDict[Node, None] = OrderedDict()

    # -- use -----------------------------------------------------------------------------------------------------------

    def acquire(self, namespace: bytes, ids: bytes, limit: int) -> tuple[Node, list[bytearray]]:
        """Pin the longest prefix known of `ids[:limit]` (bytes, whole blocks). -> its end, its blocks in parts."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(bytearray(namespace), bytearray(), None)
        parts: list[bytearray] = []
        node, _ = self._descend(root, ids, 0, limit, parts)
        self.pin(node)
        return node, parts

    def insert(self, node: Node, ids: bytes, begin: int, end: int, blocks: bytearray) -> tuple[Node, int]:
        """Add `ids[begin:end]` below `node`, which ends at `begin` and which the caller pinned; the pin moves along.

        `blocks[0]` is the block of `ids[begin]`. -> the node at `end`, and up to where (bytes) the trie had the ids
        already: it keeps its own blocks for those and takes the caller's from there on.
        """
        parts: list[bytearray] = []
        below, present = self._descend(node, ids, begin, end, parts)
        if below is not node:
            self.pin(below)
            self.unpin(node)
            node = below
        if present == end:
            return node, present
        stride = self.stride
        fresh = blocks[(present - begin) // stride * BLOCK_BYTES : (end - begin) // stride * BLOCK_BYTES]
        if node.spilled:
            node, adopted = self._adopt(node, ids, present, end, fresh)
            if adopted == end:
                return node, present
            fresh = fresh[(adopted - present) // stride * BLOCK_BYTES :]
        else:
            adopted = present
        self.num_blocks += len(fresh) // BLOCK_BYTES
        if node.pins == 1 and not (node.children or node.spilled) and node.parent is not None:
            # A leaf of nobody else's grows in place: a chunked prompt stays one node, a long chat too.
            node.key += ids[adopted:end]
            node.blocks += fresh
            return node, present
        leaf = Node(bytearray(ids[adopted:end]), fresh, node)
        node.children[ids[adopted : adopted + stride]] = leaf
        leaf.pins = leaf.held = 1
        node.held += 1
        self.unpin(node)
        return leaf, present

    def has_next(self, node: Node, ids: bytes, begin: int) -> bool:
        """Does the trie have the block of ids that follows `node`, which ends at `begin`?"""
        return ids[begin : begin + self.stride] in node.children

    def pin(self, node: Node) -> None:
        node.pins += 1
        while True:
            node.held += 1
            parent = node.parent
            if node.held > 1 or parent is None:
                return
            del self._unused[node]
            self.num_unused -= len(node.blocks) // BLOCK_BYTES
            node = parent

    def unpin(self, node: Node) -> None:
        assert node.pins > 0, "unpinned more often than pinned"
        node.pins -= 1
        while True:
            node.held -= 1
            if node.held:
                return
            parent = node.parent
            if parent is None:
                self._drop_empty_root(node)
                return
            self._unused[node] = None
            self.num_unused += len(node.blocks) // BLOCK_BYTES
            node = parent

    # -- the host tier -------------------------------------------------------------------------------------------------

    def bring_back(self, node: Node, withheld: list[Node], blocks: bytearray) -> Node:
        """The `withheld` nodes, a path below `node`, get `blocks` of the cache. The caller's pin moves to their end."""
        return self._revive(node, withheld, blocks, is_copy=True)

    def _adopt(self, node: Node, ids: bytes, begin: int, end: int, blocks: bytearray) -> tuple[Node, int]:
        """Spilled nodes that hold what was computed again take the `blocks` of that; the pin on `node` moves along.

        -> the node where they end, and where that is (bytes).
        """
        host = self.host
        assert host is not None
        found = host.match(node, ids, begin, end)
        if found == begin:
            return node, begin
        return self._revive(node, host.withhold(node, ids, begin, found), blocks, is_copy=False), found

    def _revive(self, node: Node, withheld: list[Node], blocks: bytearray, is_copy: bool) -> Node:
        host = self.host
        assert host is not None
        below, begin = node, 0
        for revived in withheld:
            taken = blocks[begin : begin + len(revived.blocks)]
            host.release(revived, taken if is_copy else None)
            revived.blocks = taken
            first = bytes(revived.key[: self.stride])
            del below.spilled[first]
            below.children[first] = revived
            self._unused[revived] = None  # until the pin comes
            below, begin = revived, begin + len(taken)
        self.num_blocks += begin // BLOCK_BYTES
        self.num_unused += begin // BLOCK_BYTES
        self.pin(below)
        self.unpin(node)
        return below

    def forget(self, blocks: frozenset[int], host_blocks: frozenset[int]) -> bytearray:
        """Remove what lies in one of these blocks, and all below it. Nothing may be pinned. -> blocks of the cache that
        are free now"""
        freed = bytearray()
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            keep = first_of(node.blocks, blocks)
            if keep < len(node.blocks):
                freed += self._cut(node, keep)
            else:
                stack.extend(node.children.values())
        if self.host is not None:
            self.host.forget(host_blocks)
        return freed

    def _cut(self, node: Node, keep: int) -> bytearray:
        """Remove the blocks of `node` from byte `keep` on, and all below it. -> the blocks"""
        freed = bytearray()
        for below in reversed(list(self._subtree([node]))):
            first = keep if below is node else 0
            freed += below.blocks[first:]
            if self.host is not None:
                self.host.drop_below(below)
            self._shorten(below, first)
        self._count_out(freed)
        return freed

    # -- eviction ------------------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int, spill: bool = True) -> bytearray:
        """Give up `num_blocks` blocks, fewer when no more are unused: least recently used first, from a leaf's end.

        Where there is a host tier they go there, if `spill`; otherwise nothing may be left in it.
        """
        host = self.host if spill else None
        evicted = bytearray()
        missing = num_blocks * BLOCK_BYTES
        while missing > 0 and self._unused:
            leaf = next(iter(self._unused))
            size = len(leaf.blocks)
            keep = size - missing if size > missing else 0
            evicted += leaf.blocks[keep:] if keep else leaf.blocks
            missing -= size - keep
            if host is not None:
                host.spill(leaf, keep)
            self._shorten(leaf, keep)
        self._count_out(evicted)
        return evicted

    def _count_out(self, blocks: bytearray) -> None:
        count = len(blocks) // BLOCK_BYTES
        self.num_blocks -= count
        self.num_unused -= count

    def _shorten(self, leaf: Node, keep: int) -> None:
        """Take the blocks from byte `keep` on out of an unused leaf, and the leaf out of the trie when none is left."""
        assert not leaf.children, "a node stands before its children"
        if keep:
            del leaf.blocks[keep:]
            del leaf.key[keep // BLOCK_BYTES * self.stride :]
            return
        del self._unused[leaf]
        parent = leaf.parent
        assert parent is not None
        del parent.children[bytes(leaf.key[: self.stride])]
        if parent.parent is None and not parent.held:
            self._drop_empty_root(parent)

    def _drop_empty_root(self, root: Node) -> None:
        if not (root.held or root.children or root.spilled):
            del self._roots[bytes(root.key)]

    # -- walking -------------------------------------------------------------------------------------------------------

    def _descend(self, node: Node, ids: bytes, begin: int, end: int, parts: list[bytearray]) -> tuple[Node, int]:
        """Follow `ids[begin:end]` down from `node`. -> the deepest node that agrees wholly, and where it ends.

        A node that agrees in part is split there: its upper half is the answer, and the caller pins it next (an upper
        half stands behind its own parent in `_unused`, which pinning puts right).
        """
        stride = self.stride
        while begin < end:
            child = node.children.get(ids[begin : begin + stride])
            if child is None:
                break
            key = child.key
            if not ids.startswith(key, begin, end):
                node = self._split(child, shared_len(ids, begin, end, key, stride))
                parts.append(node.blocks)
                begin += len(node.key)
                break
            begin += len(key)
            parts.append(child.blocks)
            node = child
        return node, begin

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` at `length` bytes of its key. The node itself becomes the lower half, so pins on it stay right."""
        parent = node.parent
        assert parent is not None
        cut = length // self.stride * BLOCK_BYTES
        upper = Node(node.key[:length], node.blocks[:cut], parent)
        parent.children[bytes(upper.key[: self.stride])] = upper
        node.key = node.key[length:]
        node.blocks = node.blocks[cut:]
        node.parent = upper
        upper.children[bytes(node.key[: self.stride])] = node
        if node.held:
            upper.held = 1
        else:
            self._unused[upper] = None
        return upper

    # -- checks --------------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        return self._subtree(child for root in self._roots.values() for child in root.children.values())

    def _subtree(self, tops: Iterable[Node]) -> Iterator[Node]:
        """These and every node of the cache below, parents first."""
        stack = list(tops)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, pins: dict[Node, int]) -> None:
        """AssertionError unless the trie is sound and its nodes have exactly these `pins`."""
        nodes = list(self.nodes())
        roots = list(self._roots.values())
        for node in roots + nodes:
            assert node.pins == pins.get(node, 0), "pins do not match the users"
            assert node.held == node.pins + sum(child.held > 0 for child in node.children.values()), "held is wrong"
            for first, child in node.children.items():
                assert (child.parent, child.key[: self.stride]) == (node, first), "a child hangs at the wrong place"
        assert set(pins) <= set(roots + nodes), "a pinned node has left the trie"
        for namespace, root in self._roots.items():
            assert (root.key, root.parent, root.blocks) == (namespace, None, b""), "a root is broken"
            assert root.children or root.spilled or root.held, "an empty root was left behind"
        for node in nodes:
            assert len(node.key) == len(node.blocks) // BLOCK_BYTES * self.stride > 0, "key and blocks differ"
        place = {node: index for index, node in enumerate(self._unused)}
        assert set(place) == {node for node in nodes if not node.held}, (
            "the order of eviction lacks or has a node too much"
        )
        for node, index in place.items():
            assert all(place[child] < index for child in node.children.values()), "a node stands before its children"
        assert self.num_unused == sum(len(node.blocks) for node in place) // BLOCK_BYTES, "num_unused is wrong"
        assert self.num_blocks == sum(len(node.blocks) for node in nodes) // BLOCK_BYTES, "num_blocks is wrong"
        if self.host is not None:
            self.host.check(iter(roots + nodes))
