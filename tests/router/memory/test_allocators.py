"""Both allocators under any sequence of operations, against a model of what the device has in its blocks.

The model writes what a row computes into the row's own blocks and checks, at each allocation, that the cached prefix
really lies in the blocks handed out for it; `check()` looks at the books after every operation.
"""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tgi.router.memory.allocator import Allocation, Allocator
from tgi.router.memory.radix import RadixAllocator
from tgi.router.memory.simple import SimpleAllocator


class Row:
    def __init__(self, allocation: Allocation, ids: list[int], namespace: bytes, publishes: bool) -> None:
        self.allocation = allocation
        self.blocks = memoryview(allocation.blocks).cast("I").tolist()
        self.ids = ids
        self.namespace = namespace
        self.publishes = publishes
        self.computed_len = allocation.cached_len

    @property
    def packed(self) -> bytes:
        return array("I", self.ids).tobytes()


class Model:
    """The allocator's user and its device in one."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.rows: list[Row] = []
        self.cache: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}  # (block, offset) -> prefix it is of

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
        room = len(row.blocks) * self.allocator.block_size
        for position in range(row.computed_len, min(row.computed_len + count, len(row.ids), room)):
            self.cache[self._slot(row, position)] = (row.namespace, tuple(row.ids[: position + 1]))
            row.computed_len = position + 1
        self._read(row)

    def generate(self, row: Row, ids: list[int]) -> None:
        row.ids.extend(ids)

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

    def flush(self) -> None:
        allocator = self.allocator
        free, available, evicted = allocator.num_free, allocator.num_available, allocator.num_evicted
        assert allocator.flush() == available - free
        assert (allocator.num_free, allocator.num_available) == (available, available)
        assert allocator.num_evicted == evicted
        for row in self.rows:
            self._read(row)

    def check(self) -> None:
        self.allocator.check([row.allocation for row in self.rows])

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.allocator.block_size], position % self.allocator.block_size

    def _read(self, row: Row) -> None:
        for position in range(row.computed_len):
            expected = (row.namespace, tuple(row.ids[: position + 1]))
            assert self.cache.get(self._slot(row, position)) == expected, f"position {position} holds something else"


def make(radix: bool, num_blocks: int, block_size: int) -> Allocator:
    return (RadixAllocator if radix else SimpleAllocator)(num_blocks, block_size)


class AllocatorMachine(RuleBasedStateMachine):
    model: Model

    @initialize(radix=st.booleans(), block_size=st.sampled_from([1, 2, 16, 64]), num_blocks=st.integers(2, 40))
    def begin(self, radix: bool, block_size: int, num_blocks: int) -> None:
        self.model = Model(make(radix, num_blocks, block_size))

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

    @rule()
    def flush(self) -> None:
        self.model.flush()

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


TestAllocators = AllocatorMachine.TestCase
TestAllocators.settings = settings(max_examples=70, stateful_step_count=40)


def run_random(model: Model, rng: random.Random, operations: int, check_every: int) -> int:
    """-> how many tokens were found cached."""
    block_size = model.allocator.block_size
    found = 0
    for number in range(operations):
        choice = rng.random()
        if choice < 0.25 or not model.rows:
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, 8 * min(block_size, 2)))]
            before = len(model.rows)
            model.allocate(ids, rng.randrange(8), b"", rng.random() < 0.9, rng.random() < 0.95, rng.randrange(3))
            if len(model.rows) > before:
                found += model.rows[-1].allocation.cached_len
        else:
            row = rng.choice(model.rows)
            if choice < 0.45:
                model.compute(row, rng.randrange(1, 6))
            elif choice < 0.55:
                model.generate(row, [rng.randrange(2)])
            elif choice < 0.65:
                model.grow(row, rng.randrange(1, 3))
            elif choice < 0.75:
                model.publish(row)
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


@pytest.mark.row("D: Radix prefix cache, LRU, splitting, refs")
def test_100_000_random_operations() -> None:
    assert run_random(Model(make(True, 100, 1)), random.Random(0), 100_000, check_every=25) > 10_000
