"""The trie alone, with one block per id unless a test says otherwise. Block numbers are chosen to be told apart."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from tgi.router.memory.node import Node, shared_len
from tgi.router.memory.trie import RadixTrie


def pack(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def unpack(packed: bytes | bytearray) -> list[int]:
    return memoryview(packed).cast("I").tolist()


class Harness:
    """The trie used as one does who keeps nothing: every lookup lets go at once."""

    def __init__(self, block_size: int = 1) -> None:
        self.trie = RadixTrie(block_size)

    def insert(self, ids: list[int], blocks: list[int]) -> int:
        """-> how many ids were there already."""
        packed = pack(ids)
        node, _ = self.trie.acquire(b"", packed, 0)
        node, present = self.trie.insert(node, packed, 0, len(packed), bytearray(pack(blocks)))
        self.trie.unpin(node)
        self.trie.check({})
        return present // 4

    def find(self, ids: list[int]) -> list[int]:
        packed = pack(ids)
        node, parts = self.trie.acquire(b"", packed, len(packed) // self.trie.stride * self.trie.stride)
        self.trie.unpin(node)
        self.trie.check({})
        return unpack(b"".join(parts))

    def evict(self, num_blocks: int) -> list[int]:
        blocks = unpack(self.trie.evict(num_blocks))
        self.trie.check({})
        return blocks


def test_insert_tells_what_was_there() -> None:
    trie = Harness()
    assert trie.insert([0, 1, 2], [0, 1, 2]) == 0
    assert trie.insert([0, 1, 2], [0, 1, 2]) == 3
    assert trie.insert([1, 2, 3], [1, 2, 3]) == 0
    assert trie.insert([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]) == 3
    assert trie.insert([0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 5, 6, 7]) == 4


def test_insert_in_blocks_of_two() -> None:
    trie = Harness(block_size=2)
    assert trie.insert([0, 1, 2, 3], [0, 1]) == 0
    assert trie.insert([0, 1, 2, 3], [0, 1]) == 4
    assert trie.insert([1, 2, 3, 4], [1, 2]) == 0
    assert trie.insert([0, 1, 2, 3, 4, 5], [0, 1, 2]) == 4
    assert trie.insert([0, 1, 3, 4, 5, 6, 7, 8], [0, 3, 4, 5]) == 2


def test_the_first_to_publish_keeps_its_blocks() -> None:
    trie = Harness()
    trie.insert([0, 1, 2], [10, 11, 12])
    trie.insert([0, 1, 2, 3], [20, 21, 22, 23])
    assert trie.find([0, 1, 2, 3]) == [10, 11, 12, 23]


@pytest.mark.row("D: Radix prefix cache, LRU, splitting, refs")
def test_eviction_is_least_recently_used_first_and_from_the_end() -> None:
    trie = Harness()
    trie.insert([0, 1, 2], [0, 1, 2])
    trie.insert([0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 5, 6, 7])
    trie.insert([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    trie.insert([1, 2, 3], [1, 2, 3])

    assert trie.evict(1) == [7]
    assert trie.find([0, 1, 2, 3, 5, 6, 7]) == [0, 1, 2, 3, 5, 6]
    trie.find([0, 1, 2, 3, 4])
    trie.find([1, 2, 3])

    assert trie.evict(2) == [5, 6]
    trie.find([1, 2, 3])
    assert trie.evict(3) == [4, 2, 3], "the shared part is one node, cut from its end"
    assert trie.find([0, 1, 2, 3, 4]) == [0, 1]
    assert trie.evict(10) == [1, 2, 3, 0, 1]
    assert trie.trie.num_blocks == 0


def test_a_parent_outlives_less_recent_leaves() -> None:
    """Who matches only the shared part refreshes it: losing the last child does not make it the next to go."""
    trie = Harness()
    trie.insert([0, 1, 2, 3], [10, 11, 12, 13])
    trie.insert([7, 8], [17, 18])
    trie.find([0, 1])
    assert trie.evict(2) == [12, 13]
    assert trie.evict(2) == [17, 18]
    assert trie.evict(2) == [10, 11]


def test_what_is_pinned_stays() -> None:
    trie = RadixTrie(1)
    ids = pack([0, 1, 2, 3])
    root, _ = trie.acquire(b"", ids, 0)
    node, _ = trie.insert(root, ids, 0, len(ids), bytearray(pack([10, 11, 12, 13])))
    other, parts = trie.acquire(b"", pack([0, 1, 9]), 12)
    assert unpack(b"".join(parts)) == [10, 11]
    trie.check({node: 1, other: 1})
    trie.unpin(node)
    assert unpack(trie.evict(10)) == [12, 13], "only what lies below the pin is unused"
    trie.check({other: 1})
    assert trie.num_unused == 0
    trie.unpin(other)
    assert unpack(trie.evict(10)) == [10, 11]


def test_a_split_leaves_pins_where_they_were() -> None:
    trie = RadixTrie(2)
    ids = pack([0, 1, 2, 3, 4, 5])
    root, _ = trie.acquire(b"", ids, 0)
    whole, _ = trie.insert(root, ids, 0, len(ids), bytearray(pack([10, 11, 12])))
    half, parts = trie.acquire(b"", pack([0, 1, 2, 3, 9, 9]), 24)
    assert (whole.pins, half.pins) == (1, 1)
    assert whole.parent is half
    assert unpack(b"".join(parts)) == [10, 11]
    assert unpack(whole.blocks) == [12]
    trie.check({whole: 1, half: 1})


def test_a_leaf_grows_in_place_only_for_its_sole_user() -> None:
    trie = RadixTrie(1)
    ids = pack(list(range(6)))
    root, _ = trie.acquire(b"", ids, 0)
    first, _ = trie.insert(root, ids, 0, 8, bytearray(pack([10, 11])))
    again, _ = trie.insert(first, ids, 8, 16, bytearray(pack([12, 13])))
    assert again is first, "a prompt computed in chunks stays one node"
    sharer, _ = trie.acquire(b"", ids, 16)
    assert sharer is first
    longer, _ = trie.insert(first, ids, 16, 24, bytearray(pack([14, 15])))
    assert longer is not first, "the sharer's prefix ends where it ended"
    trie.check({sharer: 1, longer: 1})


def test_namespaces_share_nothing_and_vanish_when_empty() -> None:
    trie = RadixTrie(1)
    ids = pack([0, 1, 2])
    pins: Counter[Node] = Counter()
    for number, namespace in enumerate((b"", b"tenant a", b"tenant b")):
        root, parts = trie.acquire(namespace, ids, len(ids))
        assert parts == []
        base = 10 * number
        node, _ = trie.insert(root, ids, 0, len(ids), bytearray(pack([base, base + 1, base + 2])))
        pins[node] += 1
    trie.check(pins)
    for node in pins:
        trie.unpin(node)
    assert len(trie.evict(100)) == 9 * 4
    trie.check({})
    assert trie._roots == {}


@pytest.mark.parametrize("stride", [4, 8, 64])
def test_shared_len_agrees_with_a_count(stride: int) -> None:
    words = stride // 4
    key = pack(list(range(64 * words)))
    for agreeing in range(65):
        ids = bytearray(pack([5] * words) + key)  # it may begin anywhere
        if agreeing < 64:
            ids[stride + agreeing * stride] ^= 1
        for length in (0, 1, agreeing, 63, 64):
            found = shared_len(bytes(ids), stride, stride + length * stride, key, stride)
            assert found == min(agreeing, length) * stride
