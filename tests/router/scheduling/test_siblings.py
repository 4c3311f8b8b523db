"""Answers to one prompt (`n`, `best_of`): read once, forked at the last full block, ended together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.scheduling import Link, MemorySink, joined, make_request, submit
from tests.fakes.scripted_shard import PlainShard, alone
from tgi.errors import GenerationFailed, Overloaded, TgiError, Unavailable
from tgi.observability.metrics import Metrics
from tgi.router.backend import Flushed, TokenEvent
from tgi.router.infer import Call, Infer
from tgi.router.scheduling import core as core_module
from tgi.router.scheduling.entry import Entry, State
from tgi.router.validation.request import ValidRequest, fork
from tgi.shard_client.messages import Admit, Sampling

VOCAB = 50
PERMITS = 8


def requests(num_prompt: int, num_answers: int, max_new_tokens: int = 6, **fields: object) -> list[ValidRequest]:
    prompt, sampling = [i * i % VOCAB for i in range(num_prompt)], Sampling(do_sample=True, seed=77)
    request = make_request(prompt, max_new_tokens, sampling=sampling, **fields)  # pyright: ignore[reportArgumentType]
    return fork(request, num_answers)


def plain(link: Link) -> PlainShard:
    assert isinstance(link.shard, PlainShard)
    return link.shard


def admits(link: Link) -> list[Admit]:
    """All that reached the shard or are on their way."""
    return [admit for command in [*plain(link).log, *link.commands] for admit in command.admit]


def cached_lens(link: Link) -> list[int]:
    return [admit.cached_len for admit in admits(link)]


def settle(link: Link) -> None:
    """Run to the end with a check after each step; then every block is free or in the tree."""
    for _ in range(5_000):
        busy = link.round()
        link.check()
        if not busy:
            break
    assert not link.core.rows
    assert not link.core.queue
    assert link.core.allocator.num_available == link.core.allocator.num_blocks - 1


# -- one prefill -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_prompt", [5, 17, 96, 100])
@pytest.mark.parametrize("budget", [16, 1_000])
def test_the_prompt_is_read_once(block_size: int, num_prompt: int, budget: int) -> None:
    shard = PlainShard(num_blocks=600, block_size=block_size, prefill_budget=budget)
    link = joined(shard)
    runs = [(request, *submit(link, request)) for request in requests(num_prompt, 4)]
    settle(link)
    forked_at = (num_prompt - 1) // block_size * block_size
    assert cached_lens(link) == [0, forked_at, forked_at, forked_at]
    assert shard.num_computed == num_prompt + 3 * (num_prompt - forked_at) + 4 * 5
    assert len({tuple(sink.ids) for _, _, sink in runs}) > 1, "each draws for itself"
    for request, _, sink in runs:
        assert sink.ids == alone(request, VOCAB)
        assert sink.finish is not None
        assert sink.finish.seed == request.sampling.seed


def test_the_others_start_together_when_the_prompt_is_there() -> None:
    link = joined(PlainShard(num_blocks=200, prefill_budget=32))
    entries = [submit(link, request)[0] for request in requests(100, 4, 40)]
    link.say()
    assert [entry.state for entry in entries] == [State.LIVE, State.QUEUED, State.QUEUED, State.QUEUED]
    link.until(lambda: entries[1].state is State.LIVE)
    assert all(entry.state is State.LIVE for entry in entries)
    assert len(entries[0].generated) <= 1, "not when its answer is there"
    assert [admit.handle for admit in link.commands[-1].admit] == [entry.handle for entry in entries[1:]]
    assert not any(entry.passed_over for entry in entries)
    settle(link)


@pytest.mark.parametrize("kind", ["no tree", "cache off", "less than a block"])
def test_who_cannot_share_does_not_wait(kind: str) -> None:
    link = joined(PlainShard(num_blocks=200, prefill_budget=32), prefix_caching=kind != "no tree")
    runs = [
        (request, *submit(link, request))
        for request in requests(16 if kind == "less than a block" else 100, 4, use_cache=kind != "cache off")
    ]
    link.say()
    assert all(entry.state is State.LIVE for _, entry, _ in runs)
    settle(link)
    assert cached_lens(link) == [0] * 4
    assert [sink.ids for _, _, sink in runs] == [alone(request, VOCAB) for request, _, _ in runs]


def test_others_with_the_same_short_prompt_do_not_wait() -> None:
    link = joined(PlainShard(num_blocks=200, prefill_budget=32))
    first = [submit(link, request)[0] for request in requests(100, 2)]
    other = submit(link, requests(100, 1)[0])[0]
    second = [submit(link, request)[0] for request in requests(100, 2)]
    link.say()
    live = [first[0], other, second[0]]
    assert [entry for entry in (*first, other, *second) if entry.state is State.LIVE] == live
    settle(link)


def test_what_was_cached_before_the_request_is_what_its_answers_report() -> None:
    link = joined(PlainShard(num_blocks=200))
    submit(link, requests(50, 1)[0])
    settle(link)
    sinks = [submit(link, request)[1] for request in requests(100, 3)]
    settle(link)
    assert cached_lens(link) == [0, 48, 96, 96]
    assert [sink.finish and sink.finish.num_cached for sink in sinks] == [48, 48, 48]
    assert (link.core.stats.prompt_tokens, link.core.stats.cached_tokens) == (350, 240)


def test_all_of_it_cached_nobody_waits() -> None:
    link = joined(PlainShard(num_blocks=200))
    submit(link, requests(100, 1)[0])
    settle(link)
    runs = [submit(link, request) for request in requests(100, 3)]
    link.say()
    assert all(entry.state is State.LIVE for entry, _ in runs)
    settle(link)
    assert [sink.finish and sink.finish.num_cached for _, sink in runs] == [96, 96, 96]


@pytest.mark.parametrize("is_warm", [False, True])
def test_the_prompts_logprobs_are_computed_for_the_first_alone(is_warm: bool) -> None:
    link = joined(PlainShard(num_blocks=200, prefill_budget=32))
    if is_warm:
        submit(link, requests(100, 1)[0])
        settle(link)
    sinks = [submit(link, request)[1] for request in requests(100, 3, prompt_logprobs=True)]
    settle(link)
    assert [admit.prompt_logprobs for admit in admits(link)][-3:] == [True, False, False]
    assert cached_lens(link)[-3:] == [0, 96, 96]
    assert [len(sink.prompts) for sink in sinks] == [1, 0, 0]
    assert len(sinks[0].prompts[0]) == 100


def test_siblings_keep_their_place_and_priority() -> None:
    link = joined(PlainShard(num_blocks=200, prefill_budget=32, max_rows=3))
    siblings = [submit(link, request)[0] for request in requests(100, 3, 30)]
    link.say()
    later, _ = submit(link, make_request(range(10), 30))
    urgent, _ = submit(link, make_request(range(10), 2, priority=1))
    latest, _ = submit(link, make_request(range(10), 30))
    link.say()
    rows = [entry.sequence for entry in link.core.rows]
    assert rows == [siblings[0].sequence, urgent.sequence, later.sequence], "who waits takes no row"
    link.until(lambda: urgent.state is State.ENDED and siblings[1].state is State.LIVE)
    assert (siblings[2].state, latest.state) == (State.QUEUED, State.QUEUED)
    link.until(lambda: siblings[2].state is not State.QUEUED or latest.state is not State.QUEUED)
    assert siblings[2].state is State.LIVE, "the earlier one goes first"
    settle(link)


# -- the leader goes ---------------------------------------------------------------------------------------------------


def during_prefill(link: Link, leader: Entry) -> None:
    link.until(lambda: 0 < leader.computed_len < leader.num_prompt)


def cancel(link: Link, leader: Entry) -> None:
    leader.cancel()


def fail(link: Link, leader: Entry) -> None:
    link.core._fail(leader, GenerationFailed("out of luck"), True)


def preempt(link: Link, leader: Entry) -> None:
    link.core._preempt(leader)


def lose_stream(link: Link, leader: Entry) -> None:
    link.open()


def lose_cache(link: Link, leader: Entry) -> None:
    plain(link).renew_cache(2)
    link.open()


@pytest.mark.parametrize("rounds", range(1, 9))
@pytest.mark.parametrize(
    ("leave", "comes_back"),
    [(cancel, False), (fail, False), (preempt, True), (lose_stream, True), (lose_cache, True)],
)
def test_when_the_leader_goes_the_next_takes_its_place(
    rounds: int, leave: Callable[[Link, Entry], None], comes_back: bool
) -> None:
    link = joined(PlainShard(num_blocks=200, block_size=4, prefill_budget=16))
    runs = [(request, *submit(link, request)) for request in requests(70, 3)]
    for _ in range(rounds):
        link.round()
    leave(link, runs[0][1])
    settle(link)
    for request, entry, sink in runs:
        assert entry.state is State.ENDED
        assert not sink.faults
        if comes_back or entry is not runs[0][1]:
            assert sink.ids == alone(request, VOCAB)


def test_the_next_reads_on_from_where_the_leader_was() -> None:
    link = joined(PlainShard(num_blocks=200, block_size=4, prefill_budget=16))
    (leader, _), *others = [submit(link, request) for request in requests(70, 3)]
    during_prefill(link, leader)
    done = leader.computed_len // 4 * 4
    leader.cancel()
    link.say()
    assert [entry.state for entry, _ in others] == [State.LIVE, State.QUEUED]
    settle(link)
    assert cached_lens(link) == [0, done, 68]


def test_a_leader_that_ends_with_its_first_token_leaves_its_prompt() -> None:
    link = joined(PlainShard(num_blocks=200))
    sinks = [submit(link, request)[1] for request in requests(100, 4, 1)]
    settle(link)
    assert cached_lens(link) == [0, 96, 96, 96]
    assert all(len(sink.ids) == 1 for sink in sinks)


@given(
    block_size=st.sampled_from([1, 4, 16, 64]),
    num_prompt=st.integers(1, 130),
    groups=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    max_new_tokens=st.integers(1, 40),
    spare_blocks=st.integers(0, 12),
    max_rows=st.integers(1, 6),
    budget=st.integers(8, 140),
    lag=st.integers(0, 2),
    speculated=st.sampled_from([0, 4]),
    logprobs=st.booleans(),
)
def test_a_tight_pool_changes_no_answer_and_stops_nobody(
    block_size: int,
    num_prompt: int,
    groups: list[int],
    max_new_tokens: int,
    spare_blocks: int,
    max_rows: int,
    budget: int,
    lag: int,
    speculated: int,
    logprobs: bool,
) -> None:
    num_blocks = 1 + -(-(num_prompt + max_new_tokens) // block_size) + spare_blocks
    shard = PlainShard(
        num_blocks=num_blocks,
        block_size=block_size,
        max_rows=max_rows,
        prefill_budget=budget,
        lag=lag,
        speculated=speculated,
    )
    link = joined(shard)
    runs = [
        [
            (request, *submit(link, request))
            for request in requests(num_prompt, n, max_new_tokens, prompt_logprobs=logprobs)
        ]
        for n in groups
    ]
    settle(link)
    for siblings in runs:
        assert [sink.ids for _, _, sink in siblings] == [alone(request, VOCAB) for request, _, _ in siblings]
        assert len({sink.finish and sink.finish.num_cached for _, _, sink in siblings}) == 1
        assert [len(sink.prompts) for _, _, sink in siblings] == [logprobs] + [False] * (len(siblings) - 1)


# -- one call owns them ------------------------------------------------------------------------------------------------


class CoreBackend:
    """The scheduler without its asyncio side."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def schedule(self, request: ValidRequest, sink: Any) -> Entry:
        return self.link.core.submit(request, sink)

    async def is_healthy(self) -> bool:
        return True

    def flush_cache(self) -> Flushed:
        return self.link.core.flush_cache()


class Group:
    """A call and its siblings."""

    def __init__(self, link: Link, valids: list[ValidRequest], sinks: list[MemorySink] | None = None) -> None:
        self.link = link
        self.infer = Infer(CoreBackend(link), cast(Any, None), Metrics(100, 200), PERMITS)
        self.sinks = sinks or [MemorySink() for _ in valids]
        self.call: Call = self.infer.accept(len(valids))
        known = set(link.core.queue)
        for request, sink in zip(valids, self.sinks, strict=True):
            self.call.schedule(request, sink)
        self.entries = [entry for entry in link.core.queue if entry not in known]

    @property
    def states(self) -> list[State]:
        return [entry.state for entry in self.entries]

    def check_gone(self, error: type[TgiError] | None) -> None:
        """Nothing is left of them; exactly one sink was told of the `error`."""
        assert self.states == [State.ENDED] * len(self.entries)
        assert self.infer.free_permits == PERMITS
        assert not any(sink.faults for sink in self.sinks)
        told = [sink.error for sink in self.sinks if sink.error is not None]
        assert len(told) == (error is not None)
        assert all(isinstance(one, error) for one in told if error is not None)
        num_events = [len(sink.events) for sink in self.sinks]
        settle(self.link)
        assert [len(sink.events) for sink in self.sinks] == num_events, "an event after the end"


def long_link() -> Link:
    return joined(PlainShard(num_blocks=200, block_size=4, prefill_budget=16))


MOMENTS = {
    "queued": lambda group: None,
    "waiting for the leader": lambda group: group.link.until(lambda: group.states[0] is State.LIVE),
    "live": lambda group: group.link.until(lambda: all(sink.events for sink in group.sinks)),
    "some ended": lambda group: group.link.until(lambda: group.states[0] is State.ENDED),
    "one preempted": lambda group: (MOMENTS["live"](group), preempt(group.link, group.entries[2])),
    "leader preempted": lambda group: (
        during_prefill(group.link, group.entries[0]),
        preempt(group.link, group.entries[0]),
    ),
    "stream lost": lambda group: (MOMENTS["live"](group), group.link.core.stream_lost()),
}


@pytest.mark.fault("vllm#14326")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancelled_request_leaves_none_of_its_answers(moment: str) -> None:
    link = long_link()
    other = make_request(range(10), 60)
    _, bystander = submit(link, other)
    group = Group(link, requests(70, 3, 20))
    MOMENTS[moment](group)
    group.call.cancel()
    group.call.cancel()
    if moment == "stream lost":
        link.open()
    group.check_gone(None)
    assert bystander.ids == alone(other, VOCAB)


class Broken(MemorySink):
    """Raises at its fourth token."""

    def token(self, event: TokenEvent) -> None:
        super().token(event)
        if len(self.events) == 4:
            self.num_ends = 0  # nobody heard of it
            raise RuntimeError("no one is there")


def own_token(answers: list[list[int]], index: int) -> int:
    """One that only this answer says, and not at once."""
    others = {token for n, answer in enumerate(answers) if n != index for token in answer}
    return next(token for token in answers[index][2:] if token not in others | {i * i % VOCAB for i in range(70)})


@pytest.mark.parametrize("kind", ["poison", "nan"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_answer_that_the_shard_fails_takes_its_siblings_along(kind: str, index: int) -> None:
    link = long_link()
    valids = requests(70, 3, 20)
    bad_ids = frozenset({own_token([alone(valid, VOCAB) for valid in valids], index)})
    if kind == "poison":
        plain(link).poison_ids = bad_ids
    else:
        plain(link).nan_ids = bad_ids
    group = Group(link, valids)
    link.until(lambda: group.states[index] is State.ENDED)
    assert group.sinks[index].error is not None
    group.check_gone(GenerationFailed)


@pytest.mark.parametrize("max_new_tokens", [20, 4], ids=["on its way", "at its end"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_answer_that_cannot_be_handed_on_takes_its_siblings_along(max_new_tokens: int, index: int) -> None:
    link = long_link()
    other = make_request(range(10), 40)
    _, bystander = submit(link, other)
    valids = requests(70, 3, 20)
    valids[index] = replace(valids[index], stopping=replace(valids[index].stopping, max_new_tokens=max_new_tokens))
    sinks = [Broken() if n == index else MemorySink() for n in range(3)]
    group = Group(link, valids, sinks)
    link.until(lambda: group.states[index] is State.ENDED)
    assert sinks[index].error is not None
    group.check_gone(GenerationFailed)
    assert bystander.ids == alone(other, VOCAB)


def test_the_end_of_service_is_told_once() -> None:
    link = long_link()
    group = Group(link, requests(70, 3, 20))
    MOMENTS["waiting for the leader"](group)
    link.core.fail_all(Unavailable("the server is shutting down"))
    group.check_gone(Unavailable)


def test_the_queue_timeout_counts_until_the_first_begins() -> None:
    now = 0.0
    link = joined(PlainShard(max_rows=1, num_blocks=200, block_size=4, prefill_budget=16), queue_timeout_s=10.0)
    link.core._clock = lambda: now
    begun = Group(link, requests(70, 3, 20))
    link.round()
    late = Group(link, requests(60, 3, 20))
    now = 10.5
    link.core.expire()
    assert [sink.num_ends for sink in begun.sinks] == [0, 0, 0]
    assert [sink.num_ends for sink in late.sinks] == [1, 0, 0]
    assert late.states == [State.ENDED] * 3
    settle(link)
    assert [sink.ids for sink in begun.sinks] == [alone(request, VOCAB) for request in requests(70, 3, 20)]
    late.check_gone(Overloaded)


def test_less_memory_after_a_restart_fails_them_once() -> None:
    link = long_link()
    group = Group(link, requests(70, 3, 20))
    MOMENTS["waiting for the leader"](group)
    link.shard = PlainShard(num_blocks=20, block_size=4, kv_epoch=9)
    link.open()
    group.check_gone(GenerationFailed)


@pytest.mark.parametrize("keep_memory", [True, False])
def test_who_outlives_no_shard_fails_with_its_siblings(keep_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "MAX_BARREN_LOSSES", 0)
    link = long_link()
    group = Group(link, requests(70, 3, 20))
    MOMENTS["live"](group)
    link.core.stream_lost(keep_memory)
    link.open()
    group.check_gone(GenerationFailed)
