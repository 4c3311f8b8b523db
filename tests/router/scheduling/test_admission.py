"""Who starts, and who waits: rows, memory, priority, prefixes under way, models that cannot chunk."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.scheduling import Link, joined, make_request, submit
from tests.fakes.scripted_shard import PlainShard, reference
from tgi.router.scheduling import admission
from tgi.router.scheduling.admission import MAX_PASSED_OVER
from tgi.router.scheduling.entry import Entry, State
from tgi.router.scheduling.prefix_wait import PrefixLeaders
from tgi.router.scheduling.queue import AGEING_S
from tgi.shard_client.messages import Admit, Step


def live(link: Link) -> list[int]:
    return [entry.sequence for entry in link.core.rows]


def admits(link: Link) -> list[Admit]:
    return [admit for command in link.commands for admit in command.admit]


def test_no_more_rows_than_there_are() -> None:
    link = joined(PlainShard(max_rows=3))
    for _ in range(5):
        submit(link, make_request(range(4)))
    link.say()
    assert live(link) == [0, 1, 2]
    assert (link.core.stats.queue_size, link.core.stats.batch_current_size) == (2, 3)
    link.run()
    assert not link.core.rows


def test_priority_then_arrival() -> None:
    link = joined(PlainShard(max_rows=2))
    for priority in (0, 0, 3):
        submit(link, make_request(range(4), priority=priority))
    link.say()
    assert live(link) == [2, 0]
    assert [admit.priority for admit in admits(link)] == [3, 0]


def test_everything_of_one_moment_leaves_in_one_command() -> None:
    link = joined()
    for _ in range(4):
        submit(link, make_request(range(4)))
    link.say()
    assert len(link.commands) == 1
    assert len(link.commands[0].admit) == 4
    link.say()
    assert len(link.commands) == 1, "nothing new, nothing said"


def test_an_admission_has_room_for_its_ids_and_the_window_but_not_for_its_answer() -> None:
    link = joined(PlainShard(block_size=1, num_blocks=2_000, window=10))
    submit(link, make_request(range(5), 1_000))
    submit(link, make_request(range(5), 3))
    link.say()
    assert [len(admit.blocks) // 4 for admit in admits(link)] == [5 + 12, 5 + 3]


def test_running_rows_keep_a_portion_each() -> None:
    shard = PlainShard(block_size=16, num_blocks=8, window=4)
    link = joined(shard)
    submit(link, make_request(range(20), 60))  # 2 blocks
    link.say()
    submit(link, make_request(range(30, 90), 10))  # 5 blocks would fit, but then nothing is left to grow
    link.say()
    assert live(link) == [0]
    submit(link, make_request(range(90, 110), 10))
    link.say()
    assert live(link) == [0, 2]


def test_who_does_not_fit_lets_others_go_first_but_not_for_ever() -> None:
    shard = PlainShard(block_size=4, num_blocks=26)  # 100 tokens
    link = joined(shard)
    filler, _ = submit(link, make_request(range(4), 40))
    link.say()
    large, _ = submit(link, make_request(range(70), 20))
    link.say()
    assert large.state is State.QUEUED
    passed = 0
    small: list[Entry] = []
    while large.state is State.QUEUED:
        while len(link.core.queue) < 3:
            # Of all lengths, so that they never end together and leave the pool to the large one by chance.
            small.append(submit(link, make_request([passed % 50, 1], 4 + passed * 7 % 19))[0])
            passed += 1
        if filler.state is State.ENDED:
            filler, _ = submit(link, make_request(range(4), 40))
        link.round()
        assert passed < 500, "it starves"
    assert 0 < sum(entry.state is not State.QUEUED for entry in small) <= MAX_PASSED_OVER + 8
    link.run()
    link.check()


def test_nobody_passes_who_ran_already() -> None:
    shard = PlainShard(block_size=4, num_blocks=60)
    link = joined(shard)
    submit(link, make_request(range(40), 40))
    link.say()
    returning, _ = submit(link, make_request(range(50, 60), 30))
    link.say()
    link.until(lambda: returning.num_tokens >= 12)
    link.core._preempt(returning)
    newcomer, _ = submit(link, make_request(range(3), 2))
    taken = link.core.allocator.allocate(bytes(4), (link.core.allocator.num_available - 8) * 4, read=False)
    assert taken is not None  # 8 blocks are left: 2 for the newcomer and 4 to grow would fit, 5 and 4 do not
    link.say()
    assert (returning.state, newcomer.state) == (State.QUEUED, State.QUEUED)
    link.core.allocator.free(taken)
    link.core._may_admit = True
    link.say()
    assert (returning.state, newcomer.state) == (State.LIVE, State.LIVE)
    assert admits(link)[-2].generated_ids, "it goes on from what it has"
    link.run()


# -- waiting for a prefix ----------------------------------------------------------------------------------------------


def prefix_link() -> Link:
    return joined(PlainShard(num_blocks=400, block_size=16, prefill_budget=128, max_rows=16))


LONG = [i % 50 for i in range(1_000)]


def test_a_request_waits_while_a_row_computes_its_prefix() -> None:
    link = prefix_link()
    leader, _ = submit(link, make_request([*LONG, 1], 3))
    waiters = [submit(link, make_request([*LONG, 2, n], 3)) for n in range(5)]
    other, _ = submit(link, make_request([3, *LONG], 3))
    link.say()
    assert live(link) == [leader.sequence, other.sequence]
    link.run()
    for entry, sink in waiters:
        assert sink.finish is not None
        assert sink.finish.num_cached == 992
        assert sink.ids == reference(entry.request.prompt_ids, 3, 50)
    shard = link.shard
    assert isinstance(shard, PlainShard)
    assert shard.num_computed < 2 * len(LONG) + 300, "once for all, and once for the other"


def test_a_pass_looks_at_so_many_waiters_and_all_of_them_start_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_SHARERS", 3)
    link = prefix_link()
    leader, _ = submit(link, make_request([*LONG, 1], 20))
    waiters = [submit(link, make_request([*LONG, 2, n], 3))[0] for n in range(8)]
    late, _ = submit(link, make_request(range(5), 3))
    looked_at: list[Entry] = []
    must_wait = PrefixLeaders.must_wait

    def spy(leaders: PrefixLeaders, entry: Entry) -> bool:
        looked_at.append(entry)
        return must_wait(leaders, entry)

    monkeypatch.setattr(PrefixLeaders, "must_wait", spy)
    link.say()
    assert looked_at == [leader, *waiters[:3]]
    while waiters[0].state is State.QUEUED:
        link.round()
    link.run()
    link.check()
    assert {entry.cached_len for entry in waiters} == {992}
    assert late.state is State.ENDED


def test_nobody_waits_for_little() -> None:
    link = prefix_link()
    submit(link, make_request(LONG[:250], 3))
    submit(link, make_request(LONG[:250], 3))
    submit(link, make_request([*LONG[:300], 1], 3))
    submit(link, make_request([*LONG[:260], 2], 3))
    submit(link, make_request([*LONG[:255], 3], 3))
    link.say()
    assert live(link) == [0, 1, 2, 4], "250 tokens are not worth it, 256 are"
    link.run()


@pytest.mark.parametrize("kind", ["cache off", "prompt logprobs", "other salt"])
def test_who_cannot_share_does_not_wait(kind: str) -> None:
    link = prefix_link()
    submit(link, make_request(LONG, 3))
    fields: dict[str, dict[str, Any]] = {
        "cache off": {"use_cache": False},
        "prompt logprobs": {"prompt_logprobs": True},
        "other salt": {"cache_salt": "mine"},
    }
    submit(link, make_request(LONG, 3, **fields[kind]))
    link.say()
    assert live(link) == [0, 1]
    link.run()


def test_without_a_tree_nobody_waits() -> None:
    link = joined(PlainShard(num_blocks=400, prefill_budget=128), prefix_caching=False)
    for _ in range(3):
        submit(link, make_request(LONG, 3))
    link.say()
    assert live(link) == [0, 1, 2]
    link.run()


def test_waiters_start_when_the_leaders_prompt_is_there_not_when_it_ends() -> None:
    link = joined(PlainShard(num_blocks=400, prefill_budget=2_000))
    leader, _ = submit(link, make_request(LONG, 100))
    waiter, sink = submit(link, make_request([*LONG, 5], 3))
    link.until(lambda: sink.finish)
    assert (leader.state, waiter.cached_len) == (State.LIVE, 992)
    link.run()


def test_when_the_leader_goes_the_first_waiter_takes_its_place() -> None:
    link = prefix_link()
    leader, _ = submit(link, make_request(LONG, 3))
    first, first_sink = submit(link, make_request(LONG, 3))
    second, second_sink = submit(link, make_request(LONG, 3))
    link.round()
    link.round()
    leader.cancel()
    link.say()
    assert (first.state, second.state) == (State.LIVE, State.QUEUED)
    link.run()
    assert first_sink.ids == second_sink.ids == reference(first.request.prompt_ids, 3, 50)


def test_a_waiter_lends_its_priority() -> None:
    link = prefix_link()
    leader, _ = submit(link, make_request(LONG, 3))
    link.say()
    assert leader.seniority == (0, 0)
    submit(link, make_request(LONG, 3, priority=7))
    link.say()
    assert leader.seniority == (-7, 0)
    link.until(lambda: leader.decoding)
    assert leader.seniority == (0, 0), "given back when the prefix is there"
    link.run()


def test_a_waiter_lends_its_priority_again_when_its_leader_comes_back() -> None:
    link = prefix_link()
    leader, _ = submit(link, make_request(LONG, 3))
    waiter, _ = submit(link, make_request(LONG, 3, priority=7))
    link.core.queue.remove(waiter)
    link.say()
    leaders = PrefixLeaders(16)
    for _ in range(2):
        leaders.add(leader)
        assert leaders.must_wait(waiter)
        assert leader.lent_priority == 7
        leaders.remove(leader)
        assert leader.lent_priority == 0


def test_nobody_waits_for_a_row_that_has_read_its_prompt_and_waits_for_its_grammar() -> None:
    """Its last position is computed when its grammar is there: in some seconds, perhaps."""
    link = prefix_link()
    whole_blocks = LONG[:992]
    leader, _ = submit(link, make_request(whole_blocks, 3))
    follower, _ = submit(link, make_request([*whole_blocks, 7], 3))
    link.say()
    assert (leader.state, follower.state) == (State.LIVE, State.QUEUED)
    link.core.handle_step(Step(1, 1, progress_handles=array("Q", [leader.handle]), computed_len=array("I", [991])))
    link.say()
    assert (follower.state, follower.cached_len) == (State.LIVE, 976)


# -- prefill that cannot be chunked ------------------------------------------------------------------------------------


@pytest.mark.row("D: waiting_served_ratio, max_waiting_tokens, max_batch_size")
def test_without_chunks_newcomers_wait_for_company_or_for_their_turn() -> None:
    link = joined(supports_chunking=False, waiting_served_ratio=1.0, max_waiting_tokens=10)
    for n in range(2):
        submit(link, make_request(range(4 + n), 40))
    link.say()
    assert live(link) == [0, 1], "an idle server does not wait"
    submit(link, make_request(range(10), 40))
    for _ in range(6):
        link.round()
    assert live(link) == [0, 1]
    submit(link, make_request(range(10), 40))
    link.say()
    assert live(link) == [0, 1, 2, 3]
    submit(link, make_request(range(10), 40))
    for _ in range(20):
        link.round()
    assert live(link) == [0, 1, 2, 3, 4]
    assert link.core.stats.concat == {"backpressure": 1, "wait_exceeded": 1}
    link.run()


@pytest.mark.row("D: waiting_served_ratio, max_waiting_tokens, max_batch_size")
@pytest.mark.parametrize("supports_chunking", [False, True])
def test_waiting_tokens_begin_at_one_and_count_decode_steps(supports_chunking: bool) -> None:
    link = joined(supports_chunking=supports_chunking, waiting_served_ratio=5.0, max_waiting_tokens=6)
    first, _ = submit(link, make_request(range(4), 40))
    link.until(lambda: first.decoding)
    late, _ = submit(link, make_request(range(5), 40))
    link.say()
    if not supports_chunking:
        assert late.state is State.QUEUED
        link.until(lambda: late.state is State.LIVE)
        assert len(first.generated) == 1 + 5
    assert late.state is State.LIVE
    link.run()


@pytest.mark.row("D: waiting_served_ratio, max_waiting_tokens, max_batch_size")
def test_without_chunks_company_that_has_no_row_does_not_count() -> None:
    """TGI: fewer than the ratio wants, whether for want of requests or of rows, start nothing."""
    link = joined(PlainShard(max_rows=4), supports_chunking=False, waiting_served_ratio=1.0, max_waiting_tokens=1_000)
    for n in range(3):
        submit(link, make_request(range(4 + n), 60))
    link.round()
    for _ in range(5):
        submit(link, make_request(range(10), 5))
    for _ in range(10):
        link.round()
    assert live(link) == [0, 1, 2]
    link.run()
    assert not link.core.queue


@pytest.mark.row("D: waiting_served_ratio, max_waiting_tokens, max_batch_size")
@pytest.mark.parametrize(("supports_chunking", "sizes"), [(False, [2, 1, 1]), (True, [4])])
def test_without_chunks_the_prompts_of_one_admission_fit_one_step(supports_chunking: bool, sizes: list[int]) -> None:
    link = joined(
        PlainShard(num_blocks=2_000, prefill_budget=200),
        supports_chunking=supports_chunking,
        waiting_served_ratio=0.0,
        max_batch_prefill_tokens=100,
    )
    seen: list[float] = []

    def note(name: str, value: float, label: str | None, times: int = 1, /) -> None:
        if name == "tgi_batch_next_size":
            seen.append(value)

    link.core.stats.observe = note
    for num_prompt in (50, 50, 140, 30):  # one that is larger than the whole budget goes alone
        submit(link, make_request([num_prompt % 50] * num_prompt, 30, use_cache=False))
    link.run()
    assert seen == sizes


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=12),
    st.sampled_from([1, 4, 16, 64]),
    st.booleans(),
)
def test_an_admission_has_room_for_all_its_ids(sizes: list[tuple[int, int]], block_size: int, chunking: bool) -> None:
    """Also one that comes back with half of its answer: where prompts are not chunked, a part of the room is none."""
    num_blocks = max(5, 320 // block_size)
    link = joined(PlainShard(num_blocks=num_blocks, block_size=block_size, window=4), supports_chunking=chunking)
    for index, (num_prompt, num_answer) in enumerate(sizes):
        submit(link, make_request([index % 50] * num_prompt, num_answer, ignore_eos=True))
    for _ in range(5_000):
        link.say()
        for command in link.commands:
            for admit in command.admit:
                num_ids = (len(admit.prompt_ids) + len(admit.generated_ids)) // 4
                assert len(admit.blocks) // 4 * block_size >= num_ids
        if not link.round():
            break
    assert not link.core.rows
    assert not link.core.queue


# -- nobody starves ----------------------------------------------------------------------------------------------------


def test_a_stream_of_urgent_ones_does_not_starve_the_rest() -> None:
    now = [0.0]
    link = joined(PlainShard(max_rows=2, num_blocks=400), clock=lambda: now[0])
    patient, sink = submit(link, make_request(range(8), 30, priority=-5))
    urgent = [submit(link, make_request(range(5), 6, priority=5))[0] for _ in range(4)]
    while sink.finish is None:
        now[0] += 0.5
        assert now[0] < 4 * AGEING_S, "it starves"
        while len(link.core.queue) < 4:
            urgent.append(submit(link, make_request(range(5), 6, priority=5))[0])
        link.round()
    assert patient.admitted_at is not None
    assert AGEING_S <= patient.admitted_at <= 2 * AGEING_S
    assert sum(entry.state is State.ENDED for entry in urgent) > 10, "the others went on meanwhile"
    link.run()


def test_who_rose_and_gave_way_rises_again() -> None:
    """The pool is full of urgent ones, newcomers never end: what has aged is not made to give way by them for ever."""
    now = [0.0]
    link = joined(PlainShard(block_size=4, num_blocks=30, window=4), clock=lambda: now[0])
    patient, sink = submit(link, make_request(range(8), 60, priority=-5, ignore_eos=True))
    while sink.finish is None:
        now[0] += 0.5
        assert now[0] < 60 * AGEING_S, "it starves"
        while len(link.core.queue) < 4:
            submit(link, make_request(range(6), 30, priority=5, ignore_eos=True))
        link.round()
        link.check()
    assert link.core.stats.preemptions > 0
    assert patient.num_tokens == 68


@given(
    st.lists(
        st.tuples(st.integers(1, 80), st.integers(1, 20), st.sampled_from(["", "a", "b"]), st.sampled_from([0, 0, 4])),
        min_size=1,
        max_size=15,
    ),
    st.integers(1, 5),
)
def test_whatever_keeps_coming_everybody_gets_a_turn(first: list[tuple[int, int, str, int]], max_rows: int) -> None:
    """Misfits, clients and priorities together, under a stream of small urgent ones from a client of their own."""
    now = [0.0]
    link = joined(PlainShard(max_rows=max_rows, block_size=4, num_blocks=30), clock=lambda: now[0])
    entries = [
        submit(link, make_request(range(num_prompt), num_answer, client=client, priority=priority))[0]
        for num_prompt, num_answer, client, priority in first
    ]
    while not all(entry.state is State.ENDED for entry in entries):
        now[0] += 1.0
        assert now[0] < 3_000, "somebody starves"
        while len(link.core.queue) < len(first) + 3:
            submit(link, make_request([1, 2, 3], 4, client="stream", priority=4))
        link.round()
    link.check()
