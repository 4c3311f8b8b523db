"""Both allocators, with a host tier and without, under any sequence of operations, against a model of what the device
and the host have in their blocks.

The model writes what a row computes into the row's own blocks and checks, at each allocation, that the cached prefix
really lies in the blocks handed out for it; `check()` looks at the books after every operation. Copies are made late:
as a shard does, only before a row reads or writes.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tgi.router.memory.allocator import Allocation, Allocator
from tgi.router.memory.moves import Moves
from tgi.router.memory.radix import RadixAllocator
from tgi.router.memory.simple import SimpleAllocator


def prefixes(namespace: bytes, ids: Iterable[int]) -> Iterator[int]:
    """For each id one number that stands for all up to it."""
    prefix = hash(namespace)
    for token_id in ids:
        prefix = hash((prefix, token_id))
        yield prefix


class Row:
    def __init__(self, allocation: Allocation, ids: list[int], namespace: bytes, publishes: bool) -> None:
        self.allocation = allocation
        self.blocks = memoryview(allocation.blocks).cast("I").tolist()
        self.ids = ids
        self.prefixes = list(prefixes(namespace, ids))
        self.namespace = namespace
        self.publishes = publishes
        self.computed_len = allocation.cached_len

    @property
    def packed(self) -> bytes:
        return array("I", self.ids).tobytes()


class Preempted(NamedTuple):
    """What is left of a row that gave way."""

    ids: list[int]
    namespace: bytes
    publishes: bool
    published_len: int  # tokens that it left in the cache
    given_up: int  # blocks of cached prefixes, by then


Memory = dict[int, list[int]]  # block -> for each of its slots the prefix that ends there, as `prefixes` says it
UNWRITTEN = 0


class Model:
    """The allocator's user and its device in one."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.rows: list[Row] = []
        self.waiting: list[Preempted] = []
        self.num_flushed = 0  # blocks
        self.num_resumed = 0
        self.num_regained = 0  # tokens that a resumed row did not have to compute again
        self.cache: Memory = {}
        self.host: Memory = {}
        self.unsent: list[Moves] = []

    def allocate(self, ids: list[int], extra: int, namespace: bytes, read: bool, publishes: bool, reserve: int) -> None:
        allocator, block_size = self.allocator, self.allocator.block_size
        available = allocator.num_available
        packed = array("I", ids).tobytes()
        allocation = allocator.allocate(packed, len(ids) + extra, namespace=namespace, read=read, reserve=reserve)
        needed = -(-(len(ids) + extra) // block_size)
        if allocation is None:
            assert needed + reserve > available or allocator.shares, "refused though it fits"
            assert allocator.num_available == available, "a refusal costs nothing"
            return
        row = Row(allocation, ids, namespace, publishes)
        assert allocation.cached_len % block_size == 0
        assert 0 <= allocation.cached_len < len(ids)
        assert read or allocation.cached_len == 0
        assert len(row.blocks) == needed == allocation.num_blocks
        assert allocator.num_available >= reserve
        assert len(set(row.blocks)) == len(row.blocks)
        assert 0 not in row.blocks
        own = set(row.blocks[allocation.cached_len // block_size :])
        for other in self.rows:
            assert own.isdisjoint(other.blocks), "a block of another row"
        self.rows.append(row)
        self._read(row)

    def compute(self, row: Row, count: int) -> None:
        """The next positions, also generated ones: as far as the row has ids and room."""
        self.copy()
        room = len(row.blocks) * self.allocator.block_size
        for position in range(row.computed_len, min(row.computed_len + count, len(row.ids), room)):
            index, offset = divmod(position, self.allocator.block_size)
            block = self.cache.setdefault(row.blocks[index], [UNWRITTEN] * self.allocator.block_size)
            block[offset] = row.prefixes[position]
            row.computed_len = position + 1
        self._read(row)

    def generate(self, row: Row, ids: list[int]) -> None:
        row.ids.extend(ids)
        row.prefixes = list(prefixes(row.namespace, row.ids))

    def grow(self, row: Row, num_blocks: int) -> None:
        available = self.allocator.num_available
        blocks = self.allocator.grow(row.allocation, num_blocks)
        if blocks is None:
            assert num_blocks > available
            return
        assert num_blocks <= available
        new = memoryview(blocks).cast("I").tolist()
        assert len(new) == num_blocks
        for other in self.rows:
            assert set(new).isdisjoint(other.blocks)
        row.blocks += new
        assert row.allocation.num_blocks == len(row.blocks)
        self._read(row)

    def publish(self, row: Row) -> None:
        if row.publishes:
            self.allocator.publish(row.allocation, row.packed, row.computed_len)

    def free(self, row: Row, kept: int) -> None:
        """As at an end, a stop string (not all that was computed is kept) or a preemption."""
        self.rows.remove(row)
        if row.publishes:
            self.allocator.free(row.allocation, row.packed, min(kept, row.computed_len))
        else:
            self.allocator.free(row.allocation)

    def preempt(self, row: Row) -> None:
        published = min(row.computed_len, len(row.ids)) if row.publishes and self.allocator.shares else 0
        whole = published // self.allocator.block_size * self.allocator.block_size
        self.free(row, len(row.ids))
        self.waiting.append(Preempted(row.ids, row.namespace, row.publishes, whole, self.num_given_up))

    def resume(self, waiting: Preempted, extra: int) -> None:
        """It comes back with all its ids, and finds all that it left unless that had to make room."""
        before = len(self.rows)
        self.allocate(waiting.ids, extra, waiting.namespace, True, waiting.publishes, 0)
        if len(self.rows) == before:
            return
        self.waiting.remove(waiting)
        cached_len = self.rows[-1].allocation.cached_len
        if self.num_given_up == waiting.given_up:
            block_size = self.allocator.block_size
            assert cached_len >= min(waiting.published_len, (len(waiting.ids) - 1) // block_size * block_size)
        self.num_resumed += 1
        self.num_regained += cached_len

    @property
    def num_given_up(self) -> int:
        return self.allocator.num_evicted + self.num_flushed

    def flush(self) -> None:
        allocator = self.allocator
        free, available, evicted = allocator.num_free, allocator.num_available, allocator.num_evicted
        assert allocator.flush() == available - free
        assert allocator.num_host_used == 0
        self.num_flushed += available - free
        assert (allocator.num_free, allocator.num_available) == (available, available)
        assert allocator.num_evicted == evicted
        for row in self.rows:
            self._read(row)

    def copy(self) -> None:
        """Make the copies, in order."""
        self.send()
        for moves in self.unsent:
            self.execute(moves)
        self.unsent.clear()

    def send(self) -> None:
        """They leave in one Command, which may never arrive."""
        moves = self.allocator.take_moves()
        if moves:
            self.unsent.append(moves)

    def execute(self, moves: Moves) -> None:
        sources, targets = (memoryview(column).cast("I") for column in (moves.sources, moves.targets))
        for to_host, source, target in zip(moves.to_host, sources, targets, strict=True):
            here, there = (self.cache, self.host) if to_host else (self.host, self.cache)
            assert 0 <= target < self.allocator.num_host_blocks if to_host else 0 < target < self.allocator.num_blocks
            there[target] = list(here[source])

    def lose(self, arrived: int) -> None:
        """The stream: of what was sent, the first `arrived` did arrive; nobody knows that. All rows are gone."""
        self.send()
        for row in list(self.rows):
            self.free(row, len(row.ids))
        for moves in self.unsent[:arrived]:
            self.execute(moves)
        self.allocator.forget(self.unsent)
        self.unsent.clear()
        self.num_flushed += 1  # at least

    def check(self) -> None:
        self.allocator.check([row.allocation for row in self.rows])
        if isinstance(self.allocator, RadixAllocator) and self.allocator.num_host_blocks:
            self.check_tree(self.allocator)

    def _read(self, row: Row) -> None:
        cache, _ = self._as_copied()
        block_size = self.allocator.block_size
        for begin, block in zip(range(0, row.computed_len, block_size), row.blocks):
            expected = row.prefixes[begin : min(begin + block_size, row.computed_len)]
            assert cache.get(block, [])[: len(expected)] == expected, f"behind position {begin} lies something else"

    def _as_copied(self) -> tuple[Memory, Memory]:
        """Cache and host as they will be when the copies are made that are due."""
        self.send()
        if not self.unsent:
            return self.cache, self.host
        then = Model(self.allocator)
        then.cache, then.host = dict(self.cache), dict(self.host)
        for moves in self.unsent:
            then.execute(moves)
        return then.cache, then.host

    def check_tree(self, radix: RadixAllocator) -> None:
        """Every block of the tree holds the prefix that it hangs at, in the cache or on the host."""
        cache, host = self._as_copied()
        block_size = radix.block_size
        paths = [(bytes(root.key), [], root) for root in radix._trie._roots.values()]
        while paths:
            namespace, ids, node = paths.pop()
            for below, memory in ((node.children, cache), (node.spilled, host)):
                for child in below.values():
                    path = ids + memoryview(child.key).cast("I").tolist()
                    found = list(prefixes(namespace, path))[len(ids) :]
                    for index, block in enumerate(memoryview(child.blocks).cast("I").tolist()):
                        assert memory[block] == found[index * block_size : (index + 1) * block_size]
                    paths.append((namespace, path, child))


def make(radix: bool, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> Allocator:
    if not radix:
        return SimpleAllocator(num_blocks, block_size)
    # What has only a few tokens comes back as well, so that small blocks do.
    return RadixAllocator(num_blocks, block_size, num_host_blocks, return_worth=2)


class AllocatorMachine(RuleBasedStateMachine):
    model: Model

    @initialize(
        radix=st.integers(0, 4),
        block_size=st.sampled_from([1, 2, 16, 64]),
        num_blocks=st.integers(2, 40),
        num_host_blocks=st.just(0) | st.integers(1, 30),
    )
    def begin(self, radix: int, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self.model = Model(make(radix > 0, num_blocks, block_size, num_host_blocks))

    @rule(
        data=st.data(), extra=st.integers(0, 20), read=st.booleans(), publishes=st.booleans(), reserve=st.integers(0, 3)
    )
    def allocate(self, data: st.DataObject, extra: int, read: bool, publishes: bool, reserve: int) -> None:
        block_size = self.model.allocator.block_size
        # Few ids, whole blocks of them: overlaps, splits and equal prompts are the rule.
        words = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        tail = data.draw(st.integers(1, block_size))
        ids = [word for word in words[:-1] for _ in range(block_size)] + [words[-1]] * tail
        namespace = data.draw(st.sampled_from([b"", b"", b"salt"]))
        self.model.allocate(ids, extra, namespace, read, publishes, reserve)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), count=st.integers(1, 200))
    def compute(self, data: st.DataObject, count: int) -> None:
        self.model.compute(data.draw(st.sampled_from(self.model.rows)), count)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), count=st.integers(1, 70), word=st.integers(0, 1))
    def generate(self, data: st.DataObject, count: int, word: int) -> None:
        self.model.generate(data.draw(st.sampled_from(self.model.rows)), [word] * count)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), num_blocks=st.integers(1, 6))
    def grow(self, data: st.DataObject, num_blocks: int) -> None:
        self.model.grow(data.draw(st.sampled_from(self.model.rows)), num_blocks)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.model.publish(data.draw(st.sampled_from(self.model.rows)))

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), dropped=st.integers(0, 5))
    def free(self, data: st.DataObject, dropped: int) -> None:
        row = data.draw(st.sampled_from(self.model.rows))
        self.model.free(row, max(0, len(row.ids) - dropped))

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.model.preempt(data.draw(st.sampled_from(self.model.rows)))

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data(), extra=st.integers(0, 20))
    def resume(self, data: st.DataObject, extra: int) -> None:
        self.model.resume(data.draw(st.sampled_from(self.model.waiting)), extra)

    @rule()
    def flush(self) -> None:
        self.model.flush()

    @precondition(lambda self: self.model.allocator.num_host_blocks)
    @rule()
    def copy(self) -> None:
        self.model.copy()

    @precondition(lambda self: self.model.unsent)
    @rule(arrived=st.integers(0, 3))
    def lose(self, arrived: int) -> None:
        self.model.lose(arrived)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


TestAllocators = AllocatorMachine.TestCase
TestAllocators.settings = settings(max_examples=70, stateful_step_count=40)


def run_random(model: Model, rng: random.Random, operations: int, check_every: int, losses: float = 0.0) -> int:
    """`losses`: of the stream, per operation. -> how many tokens were found cached."""
    block_size = model.allocator.block_size
    has_host = model.allocator.num_host_blocks > 0
    found = 0
    for number in range(operations):
        if losses and rng.random() < losses:
            model.lose(rng.randrange(3))
        choice = rng.random()
        if choice < 0.08 and model.waiting:
            model.resume(model.waiting[0], rng.randrange(8))
        elif choice < 0.25 or not model.rows:
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, 8 * min(block_size, 2)))]
            if has_host:
                # Whole blocks of few words: what was evicted is asked for again.
                ids = [word for word in ids for _ in range(block_size)] + ids[:1]
            before = len(model.rows)
            model.allocate(ids, rng.randrange(8), b"", rng.random() < 0.9, rng.random() < 0.95, rng.randrange(3))
            if len(model.rows) > before:
                found += model.rows[-1].allocation.cached_len
        else:
            row = rng.choice(model.rows)
            if choice < 0.45:
                model.compute(row, rng.randrange(1, 6) * (block_size if has_host else 1))
            elif choice < 0.55:
                model.generate(row, [rng.randrange(2)])
            elif choice < 0.65:
                model.grow(row, rng.randrange(1, 3))
            elif choice < 0.75:
                model.publish(row)
            elif choice < 0.82:
                model.preempt(row)
            else:
                model.free(row, len(row.ids) - rng.randrange(3))
        if not number % check_every:
            model.check()
    while model.rows:
        model.free(model.rows[-1], len(model.rows[-1].ids))
    model.check()
    assert model.allocator.num_available == model.allocator.num_blocks - 1
    return found


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "simple"])
def test_random_operations(radix: bool, block_size: int) -> None:
    found = run_random(Model(make(radix, 60, block_size)), random.Random(block_size), 2_000, check_every=1)
    assert (found > 100) == (radix and block_size < 16)


@pytest.mark.parametrize("num_host_blocks", [5, 40, 400])
@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 256])
def test_random_operations_with_a_host_tier(block_size: int, num_host_blocks: int) -> None:
    model = Model(make(True, 30, block_size, num_host_blocks))
    run_random(model, random.Random(block_size), 800, check_every=8, losses=0.01)
    allocator = model.allocator
    assert allocator.num_offloaded > 50
    assert allocator.num_returned > (5 if num_host_blocks == 5 else 50)


@pytest.mark.row("D: Radix prefix cache, LRU, splitting, refs")
def test_100_000_random_operations() -> None:
    """Allocate, compute, grow, publish, preempt, resume, free: the books and what is read are right all the way."""
    model = Model(make(True, 100, 1))
    assert run_random(model, random.Random(0), 100_000, check_every=25) > 10_000
    assert model.allocator.num_evicted > 1_000
    assert model.num_resumed > 1_000
    assert model.num_regained > 1_000
