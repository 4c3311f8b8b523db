from __future__ import annotations

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tgi.server.batch.table import RequestTable
from tgi.shard_client.messages import Admit, Sampling, Stopping

BLOCK = 4
MAX_ROWS = 5


def admit(
    handle: int, prompt: int = 6, generated: int = 0, cached: int = 0, blocks: int = 4, max_new: int = 10
) -> Admit:
    def ids(count: int) -> bytes:
        return array("I", range(count)).tobytes()

    return Admit(handle, ids(prompt), ids(generated), cached, ids(blocks), Sampling(), Stopping(max_new))


class Rows(RuleBasedStateMachine):
    """Rows are unique, row 0 is never given, and what is freed can be had again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable(MAX_ROWS, BLOCK)
        self.rows: dict[int, int] = {}
        self.next_handle = 1

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule(generated=st.integers(0, 9))
    def add(self, generated: int) -> None:
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        row = self.table.add(admit(handle, generated=generated))
        assert row not in self.rows.values()
        assert self.table.num_ids[row] == 6 + generated
        self.rows[handle] = row

    @precondition(lambda self: len(self.rows) == MAX_ROWS)
    @rule()
    def full(self) -> None:
        with pytest.raises(LookupError):
            self.table.add(admit(10_000_000))

    @precondition(lambda self: bool(self.rows))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        assert self.table.remove(handle) == self.rows.pop(handle)
        assert self.table.remove(handle) is None

    @precondition(lambda self: bool(self.rows))
    @rule(data=st.data(), blocks=st.integers(0, 3))
    def grow(self, data: st.DataObject, blocks: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[handle]
        before = int(self.table.num_blocks[row])
        assert self.table.grow(handle, blocks) == (row, before)
        assert self.table.num_blocks[row] == before + blocks

    @invariant()
    def check(self) -> None:
        assert self.table.num_live == len(self.rows)
        assert self.table.num_free == MAX_ROWS - len(self.rows)
        assert not self.table.live[0]
        assert sorted(self.table.handles()) == sorted(self.rows)
        for handle, row in self.rows.items():
            assert self.table.row_of(handle) == row
            assert self.table.handle[row] == handle
        assert int(self.table.live.sum()) == len(self.rows)


TestRows = Rows.TestCase


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (admit(0), "in use or zero"),
        (admit(1, cached=3), "multiple of 4"),
        (admit(1, cached=8), "smaller than 6 ids"),
        (admit(1, blocks=0), "do not hold"),
        (admit(1, cached=4, blocks=1), "do not hold"),
        (admit(1, generated=10), "nothing left to generate"),
    ],
)
def test_a_request_that_breaks_the_contract_is_refused(request_: Admit, message: str) -> None:
    table = RequestTable(MAX_ROWS, BLOCK)
    with pytest.raises(ValueError, match=message):
        table.add(request_)
    assert table.num_free == MAX_ROWS


def test_handles_may_be_any_u64() -> None:
    table = RequestTable(MAX_ROWS, BLOCK)
    row = table.add(admit(2**64 - 1))
    assert int(table.handle[row]) == 2**64 - 1
    assert table.row_of(2**64 - 1) == row
