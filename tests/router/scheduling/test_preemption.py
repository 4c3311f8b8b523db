"""Memory runs short: who gets blocks, who gives way, who comes back, and that all finish with the same tokens."""

from __future__ import annotations

import pytest

from tests.fakes.scheduling import Link, MemorySink, joined, make_request, submit
from tests.fakes.scripted_shard import PlainShard, ids_of, reference
from tgi.router.scheduling.entry import Entry, State
from tgi.router.validation.request import ValidRequest


def started(link: Link, *requests: ValidRequest) -> list[tuple[Entry, MemorySink]]:
    runs = [submit(link, request) for request in requests]
    link.say()
    assert all(entry.state is State.LIVE for entry, _ in runs)
    return runs


def check_answers(runs: list[tuple[Entry, MemorySink]]) -> None:
    for entry, sink in runs:
        request = entry.request
        assert not sink.faults
        assert sink.num_ends == 1
        assert sink.ids == reference(request.prompt_ids, request.stopping.max_new_tokens, 50)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [True, False], ids=["radix", "simple"])
def test_a_tiny_pool_serves_everybody(block_size: int, caching: bool) -> None:
    shard = PlainShard(num_blocks=160 // block_size + 1, block_size=block_size)
    link = joined(shard, prefix_caching=caching)
    runs = [submit(link, make_request(range(5 + n % 3), 60 + n)) for n in range(12)]
    link.run()
    link.check()
    check_answers(runs)
    stats = link.core.stats
    assert stats.preemptions > 0
    assert (stats.queue_size, stats.batch_current_size) == (0, 0)
    assert link.core.allocator.num_available == link.core.allocator.num_blocks - 1


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    link = joined(PlainShard(num_blocks=8, block_size=16, lag=0))  # 112 tokens, and 4 × 91 wanted
    first, high, low, youngest = (
        entry
        for entry, _ in started(
            link,
            make_request([1], 90),
            make_request([2], 90, priority=1),
            make_request([3], 90, priority=-1),
            make_request([4], 90),
        )
    )
    gone: list[int] = []
    preempt = link.core._preempt

    def record(entry: Entry) -> None:
        gone.append(entry.sequence)
        preempt(entry)

    link.core._preempt = record
    link.until(lambda: len(gone) == 3)
    assert gone == [low.sequence, youngest.sequence, high.sequence]
    assert first.state is State.LIVE, "the oldest never gives way, whatever its priority"
    link.run()
    link.check()


def test_room_for_two_steps_makes_nobody_give_way() -> None:
    """What is short of the window sits tight; only a row that would stop takes another's place."""
    link = joined(PlainShard(num_blocks=13, block_size=4, lag=0, window=10))
    runs = started(link, make_request([1], 34), make_request([2], 9))
    allocator = link.core.allocator
    taken = allocator.allocate(bytes(4), allocator.num_available * 4, read=False)
    assert taken is not None
    link.until(lambda: runs[1][0].state is State.ENDED)
    link.core.allocator.check([*link.core.rows.allocations(), taken])
    assert link.core.stats.preemptions == 0
    allocator.free(taken)
    link.run()
    check_answers(runs)
    assert link.core.stats.preemptions == 0


def test_a_row_without_room_sits_out_and_the_rest_goes_on() -> None:
    link = joined(PlainShard(num_blocks=6, block_size=16, lag=0))
    (old, old_sink), (young, young_sink) = started(link, make_request([1], 15), make_request(range(9), 30))
    allocator = link.core.allocator
    taken = allocator.allocate(bytes(4), allocator.num_available * 16, read=False)
    assert taken is not None
    link.until(lambda: old.num_tokens == 14)
    assert (young.state, young.num_tokens, young.room) == (State.LIVE, 17, 16), "the last token needs no slot yet"
    allocator.free(taken)
    link.run()
    check_answers([(old, old_sink), (young, young_sink)])
    assert link.core.stats.preemptions == 0


def test_a_preempted_request_returns_under_a_new_handle_with_its_ids() -> None:
    shard = PlainShard(num_blocks=13, block_size=4)
    link = joined(shard)
    runs = started(link, make_request([1], 40), make_request([2], 30))
    link.run()
    check_answers(runs)
    again = [admit for command in shard.log for admit in command.admit if admit.generated_ids]
    assert again
    assert len({admit.handle for command in shard.log for admit in command.admit}) == 2 + len(again)
    for admit in again:
        assert ids_of(admit.prompt_ids) == [2]
        generated = ids_of(admit.generated_ids)
        assert generated == reference(admit.prompt_ids, 30, 50)[: len(generated)]
        assert admit.stopping.max_new_tokens == 30, "counted from the prompt's end"


def test_a_preempted_request_finds_what_is_left_of_its_own_prefix() -> None:
    shard = PlainShard(num_blocks=40, block_size=4)
    link = joined(shard)
    (entry, sink), _ = started(link, make_request(range(20), 40), make_request(range(30, 40), 4))
    link.until(lambda: len(sink.ids) >= 10)
    link.core._preempt(entry)
    link.run()
    again = [admit for command in shard.log for admit in command.admit if admit.generated_ids]
    assert [admit.cached_len for admit in again] == [28]
    check_answers([(entry, sink)])


def test_growth_and_giving_way_leave_in_one_command() -> None:
    shard = PlainShard(num_blocks=13, block_size=4, lag=0)
    link = joined(shard)
    started(link, make_request([1], 40), make_request([2], 40))
    link.run()
    cancelling = [command for command in shard.log if command.cancel]
    assert cancelling
    assert all(command.grow for command in cancelling), "the blocks go to whom they were taken for"


def test_a_full_pool_with_32_rows_is_no_thrashing() -> None:
    """Preemptions per token stay low, and the oldest row is never stopped."""
    shard = PlainShard(num_blocks=129, block_size=16, max_rows=32, prefill_budget=256, lag=1)  # 2,048 tokens
    link = joined(shard)
    runs = [submit(link, make_request([n % 50, n // 50, 3], 150)) for n in range(64)]
    stalled = 0
    while not all(sink.num_ends for _, sink in runs):
        oldest = min(link.core.rows, key=lambda entry: entry.sequence, default=None)
        before = len(oldest.generated) if oldest else 0
        assert link.round()
        stalled = 0 if oldest is None or len(oldest.generated) > before or oldest.state is State.ENDED else stalled + 1
        assert stalled < 6, "the oldest does not advance"
    link.check()
    check_answers(runs)
    stats = link.core.stats
    assert stats.generated_tokens == 64 * 150
    assert 0 < stats.preemptions < stats.generated_tokens / 100


@pytest.mark.parametrize("speculated", [0, 4])
def test_while_memory_lasts_no_row_waits_for_blocks(speculated: int) -> None:
    """Rule 6, with a router that says `seen` as late as it may."""
    shard = PlainShard(num_blocks=2_000, block_size=1, window=6, lag=2, speculated=speculated)
    link = joined(shard)
    runs = started(link, *(make_request([n], 150) for n in range(4)))
    sat_out = 0
    launch = shard._launch

    def watch() -> bool:
        nonlocal sat_out
        may = shard.number < shard.seen + shard.opening.window
        launched = launch()
        if launched:
            decoding = [row for row in shard.rows.values() if row.num_tokens > row.num_prompt]
            busy = {id(work[0]) for work in shard._launched[-1].work}
            sat_out += sum(id(row) not in busy and row.planned_tokens < row.limit for row in decoding)
        elif may:
            sat_out += sum(row.planned_tokens < row.limit for row in shard.rows.values())
        return launched

    shard._launch = watch
    while not all(sink.num_ends for _, sink in runs):
        link.hear()
        for _ in range(shard.opening.window):
            link.advance()
        while link.deliver():
            pass
    assert sat_out == 0
    check_answers(runs)


def test_seen_is_said_every_half_window() -> None:
    shard = PlainShard(num_blocks=200, block_size=16, window=8, lag=0)
    link = joined(shard)
    started(link, make_request([1], 14))
    link.run()
    assert [command.seen for command in shard.log] == [0, 4, 8, 12]
