from __future__ import annotations

import threading
from array import array

from hypothesis import given
from hypothesis import strategies as st

from tgi.enums import EndReason
from tgi.server.engine.outbox import MAX_TOKENS_PER_ROW, Outbox, merge
from tgi.shard_client.messages import Opening, RowError, Step, Timings, TopTokens


def step(
    number: int, tokens: dict[int, list[int]], ends: dict[int, EndReason] | None = None, **columns: object
) -> Step:
    made = Step(number=number, kv_epoch=1, timings=Timings(steps=1, forward_ns=10), **columns)  # type: ignore[arg-type]
    for handle, ids in tokens.items():
        made.handles.append(handle)
        made.token_ids.extend(ids)
        made.logprobs.extend(float(-token) for token in ids)
    if any(len(ids) != 1 for ids in tokens.values()):
        made.num_tokens = bytes(len(ids) for ids in tokens.values())
    if ends:
        made.ends = bytes(ends.get(handle, EndReason.RUNNING) for handle in tokens)
    return made


def read(message: Step) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    position = 0
    for index, handle in enumerate(message.handles):
        count = message.num_tokens[index] if message.num_tokens else 1
        rows[handle] = list(message.token_ids[position : position + count])
        assert list(message.logprobs[position : position + count]) == [float(-token) for token in rows[handle]]
        position += count
    assert position == len(message.token_ids)
    return rows


@given(
    st.lists(
        st.dictionaries(st.integers(1, 5), st.lists(st.integers(0, 99), min_size=1, max_size=3)), min_size=1, max_size=6
    )
)
def test_merging_keeps_every_token_in_order(messages: list[dict[int, list[int]]]) -> None:
    expected: dict[int, list[int]] = {}
    for tokens in messages:
        for handle, ids in tokens.items():
            expected.setdefault(handle, []).extend(ids)
    merged = merge([step(number, tokens) for number, tokens in enumerate(messages, 1)])
    assert read(merged) == expected
    assert merged.number == len(messages)
    assert merged.timings.steps == len(messages)
    assert merged.timings.forward_ns == 10 * len(messages)


def test_ends_progress_errors_and_top_tokens_survive() -> None:
    first = step(1, {1: [10], 2: [20]}, progress_handles=array("Q", [3]), computed_len=array("I", [64]))
    first.top_tokens = [TopTokens(2, 0, array("I", [20, 21]), array("f", [-1, -2]))]
    second = step(2, {2: [22], 3: [30]}, {2: EndReason.EOS}, errors=[RowError(4, "generation", "x")])
    second.top_tokens = [TopTokens(2, 0, array("I", [22, 23]), array("f", [-1, -2]))]
    merged = merge([first, second])
    assert [merged.end_of(index) for index in range(3)] == [EndReason.RUNNING, EndReason.EOS, EndReason.RUNNING]
    assert [(top.handle, top.index, top.token_ids[0]) for top in merged.top_tokens] == [(2, 0, 20), (2, 1, 22)]
    assert list(merged.progress_handles) == [], "row 3 has its first id: its prompt is read"
    assert [error.handle for error in merged.errors] == [4]


def test_the_opening_travels_alone_and_what_waits_is_taken_after_the_close() -> None:
    outbox = Outbox()
    outbox.put(Step(number=0, kv_epoch=1, opening=Opening(4, 8, 100, 16)))
    outbox.put(step(1, {1: [1]}))
    outbox.put(step(2, {1: [2]}))
    outbox.close("over")
    opening = outbox.take()
    assert opening is not None
    assert opening.opening is not None
    rest = outbox.take()
    assert rest is not None
    assert read(rest) == {1: [1, 2]}
    assert outbox.take() is None
    assert outbox.closed_because == "over"


def test_a_row_never_has_more_tokens_than_its_byte_counts() -> None:
    outbox = Outbox()
    for number in range(1, 601):
        outbox.put(step(number, {1: [number]}))
    taken: list[int] = []
    while len(taken) < 600:
        message = outbox.take()
        assert message is not None
        ids = read(message)[1]
        assert len(ids) <= MAX_TOKENS_PER_ROW
        taken += ids
    assert taken == list(range(1, 601))


def test_a_waiting_taker_is_woken_by_the_close() -> None:
    outbox = Outbox()
    results: list[Step | None] = []
    taker = threading.Thread(target=lambda: results.append(outbox.take()))
    taker.start()
    outbox.close("gone")
    taker.join(10)
    assert results == [None]
