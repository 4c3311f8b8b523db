"""Any order of what may happen to scheduler and allocator, found and shrunk by hypothesis. The long form is soak.

A request's tokens are a function of its prompt, its seed and their position. So whatever became of it on the way
(waits, chunks, grants, preemption, lost streams, dead shards) its client must see the beginning of that one answer, and
in the end all of it, once. Only these may fail: who breaks its own row, who waited for too long, and who was there each
time that a shard was killed without getting a token meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.fakes.scheduling import MemorySink, joined, make_request
from tests.fakes.scripted_shard import PlainShard, Row, ShardDied, alone, ids_of
from tests.fakes.seam import Run, check_answer
from tgi.errors import ContextTooLong, GenerationFailed, Overloaded
from tgi.router.scheduling.core import MAX_BARREN_CUTS
from tgi.router.scheduling.entry import State
from tgi.router.validation.request import fork
from tgi.shard_client.messages import Sampling

VOCAB = 120  # what answers are made of; ids from here on mark the requests that break something
KILLS_AT_ONCE, KILLS_LATER, GIVES_NAN, FAILS = BREAKERS = range(VOCAB, VOCAB + 4)
LATER = 3  # tokens that one of KILLS_LATER gets before it kills
ROWS = 6
QUEUE_TIMEOUT_S = 60.0
MOST_ROUNDS = 20_000


def kills(row: Row) -> bool:
    return KILLS_AT_ONCE in row.ids or (KILLS_LATER in row.ids and len(row.ids) >= row.num_prompt + LATER)


@dataclass
class Deaths:
    """Streams that were lost under a request since its last token, by what was to blame."""

    num_tokens: int = 0  # it had at that time
    breakers: int = 0
    kills: int = 0  # from outside
    cuts: int = 0  # which the shard survived

    def count(self, num_tokens: int, breakers: int = 0, kills: int = 0, cuts: int = 0) -> None:
        if num_tokens > self.num_tokens:
            self.num_tokens, self.breakers, self.kills, self.cuts = num_tokens, 0, 0, 0
        self.breakers += breakers
        self.kills += kills
        self.cuts += cuts

    @property
    def look_like_its_own(self) -> bool:
        """Nobody could tell this request from one that kills."""
        total = self.breakers + self.kills + self.cuts
        return total > 1 and (self.kills > 0 or (self.cuts > 0 and total >= MAX_BARREN_CUTS))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 16, 64, 256]),
        window=st.sampled_from([4, 9]),
        lag=st.integers(0, 2),
        speculated=st.sampled_from([0, 4]),
        prefix_caching=st.booleans(),
        host_blocks=st.sampled_from([0, 0, 30]),
        chunks=st.booleans(),
    )
    def begin(
        self,
        block_size: int,
        window: int,
        lag: int,
        speculated: int,
        prefix_caching: bool,
        host_blocks: int,
        chunks: bool,
    ) -> None:
        self.now = 0.0
        self.runs: list[Run] = []
        self.answers: dict[int, list[int]] = {}  # of undisturbed runs; by the entry's sequence
        self.deaths: dict[int, Deaths] = {}  # likewise
        self.epochs = itertools.count(2)
        self.longest_prompt = max(40, 2 * block_size)
        self.shard = PlainShard(
            num_blocks=max(7, 160 // block_size + 2),  # some three rows fill it
            block_size=block_size,
            window=window,
            max_rows=ROWS,
            prefill_budget=max(24, block_size),
            lag=lag,
            speculated=speculated,
            vocab_size=VOCAB,
            num_host_blocks=host_blocks,
            chunks=chunks,
        )
        self.shard.kills = kills
        self.shard.nan_ids, self.shard.poison_ids = frozenset({GIVES_NAN}), frozenset({FAILS})
        self.link = joined(
            self.shard,
            clock=lambda: self.now,
            prefix_caching=prefix_caching,
            supports_chunking=chunks,
            queue_timeout_s=QUEUE_TIMEOUT_S,
        )

    # -- clients -------------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        shared=st.tuples(st.integers(0, 1), st.integers(0, 600)),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_new_tokens=st.integers(1, 60),
        priority=st.sampled_from([0, 0, 1, -1]),
        answers=st.sampled_from([1, 1, 1, 2, 4]),
        stop=st.sampled_from([(), (), ("a",), ("bc", "d")]),
        asks_prompt_logprobs=st.sampled_from([False, False, True]),
        use_cache=st.sampled_from([True, True, False]),
        cache_salt=st.sampled_from(["", "", "salt"]),
        client=st.sampled_from(["", "", "one", "other"]),
        seed=st.integers(0, 1),
    )
    def submit(
        self,
        data: st.DataObject,
        shared: tuple[int, int],
        own: list[int],
        max_new_tokens: int,
        priority: int,
        answers: int,
        stop: tuple[str, ...],
        asks_prompt_logprobs: bool,
        use_cache: bool,
        cache_salt: str,
        client: str,
        seed: int,
    ) -> None:
        """Beginnings that several have in common; now and then the next turn of a chat."""
        family, length = shared
        prompt = [(family * 7 + index * index) % VOCAB for index in range(length % self.longest_prompt)]
        if self.runs and data.draw(st.sampled_from([False, False, True])):
            earlier = data.draw(st.sampled_from(self.runs))
            prompt = [token for token in (*ids_of(earlier.request.prompt_ids), *earlier.sink.ids) if token < VOCAB]
        self._submit(
            [*prompt[: max(90, self.longest_prompt)], *own],
            max_new_tokens,
            answers,
            stop=stop,
            priority=priority,
            prompt_logprobs=asks_prompt_logprobs,
            prompt_top_n=2 * asks_prompt_logprobs,
            use_cache=use_cache,
            cache_salt=cache_salt,
            client=client,
            sampling=Sampling(do_sample=True, seed=seed),
        )

    @rule(size=st.integers(4, 9), prompt=st.integers(1, 30), max_new_tokens=st.integers(40, 90))
    def submit_more_than_fits(self, size: int, prompt: int, max_new_tokens: int) -> None:
        """Their answers outgrow the pool at the same time."""
        for number in range(size):
            self._submit([number] * prompt, max_new_tokens, 1, priority=number % 3 - 1)

    @rule(breaker=st.sampled_from(BREAKERS), length=st.integers(0, 40), max_new_tokens=st.integers(1, 30))
    def submit_one_that_breaks(self, breaker: int, length: int, max_new_tokens: int) -> None:
        self._submit([*range(length % self.longest_prompt), breaker], max_new_tokens, 1)

    @rule(length=st.integers(1, 40))
    def submit_what_could_never_fit(self, length: int) -> None:
        allocator, queued = self.link.core.allocator, len(self.link.core.queue)
        most = (allocator.num_blocks - 1) * allocator.block_size
        with pytest.raises(ContextTooLong):
            self.link.core.submit(make_request(range(length), most + 1 - length), MemorySink())
        assert len(self.link.core.queue) == queued

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), with_siblings=st.booleans())
    def hang_up(self, data: st.DataObject, with_siblings: bool) -> None:
        run = data.draw(st.sampled_from(self.runs))
        siblings = run.request.siblings
        for other in self.runs:
            if other is run or (with_siblings and siblings is not None and other.request.siblings is siblings):
                other.is_cancelled = other.is_cancelled or not other.sink.num_ends
                other.entry.cancel()

    # -- router and shard, each at its own pace ------------------------------------------------------------------------

    @rule(rounds=st.integers(1, 30))
    def work_in_step(self, rounds: int) -> None:
        self._watched(lambda: [self.link.round() for _ in range(rounds)])

    @rule(commands=st.integers(1, 4))
    def the_shard_hears(self, commands: int) -> None:
        for _ in range(commands):
            self.link.say()
            self.link.hear()

    @rule(steps=st.integers(1, 12))
    def the_shard_runs_ahead(self, steps: int) -> None:
        """Up to its window: a slow router reads none of it."""
        self._watched(lambda: [self.link.advance() for _ in range(steps)])

    @rule(messages=st.integers(1, 4), merged=st.sampled_from([1, 1, 3]))
    def the_router_reads(self, messages: int, merged: int) -> None:
        for _ in range(messages):
            self.link.deliver(merged)

    @rule(seconds=st.sampled_from([1.0, 20.0, QUEUE_TIMEOUT_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.link.core.expire()

    @rule()
    def flush_the_cache(self) -> None:
        self.link.core.flush_cache()

    # -- what breaks ---------------------------------------------------------------------------------------------------

    @rule()
    def the_stream_is_cut(self) -> None:
        self._count_loss(cuts=1)
        self.link.open()

    @rule(reads_first=st.booleans())
    def the_shard_is_killed(self, reads_first: bool) -> None:
        self._die(reads_first, kills=1)

    def _die(self, reads_first: bool = True, **to_blame: int) -> None:
        while reads_first and self.link.deliver():
            pass  # what had reached the router's socket
        self._count_loss(**to_blame)
        self.shard.renew_cache(next(self.epochs))
        self.link.open()

    def _count_loss(self, **to_blame: int) -> None:
        for run in self._open_runs():
            if run.entry.state is State.LIVE:
                self.deaths[run.entry.sequence].count(len(run.sink.ids), **to_blame)

    def _watched(self, work: Callable[[], object]) -> None:
        try:
            work()
        except ShardDied:
            self._die(breakers=1)

    def _submit(self, prompt: list[int], max_new_tokens: int, answers: int, **fields: object) -> None:
        request = make_request(prompt, max_new_tokens, **fields)  # pyright: ignore[reportArgumentType]
        for sibling in fork(request, answers):
            sink = MemorySink()
            run = Run(sibling, self.link.core.submit(sibling, sink), sink)
            self.runs.append(run)
            self.deaths[run.entry.sequence] = Deaths()
            self.answers[run.entry.sequence] = alone(sibling, VOCAB)

    def _open_runs(self) -> list[Run]:
        return [run for run in self.runs if not (run.sink.num_ends or run.is_cancelled)]

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        core = self.link.core
        self.link.check()
        assert len(core.rows) <= ROWS
        assert core.rows.room == sum(entry.room for entry in core.rows)

    @invariant()
    def nobody_sees_anything_but_its_answer(self) -> None:
        for run in self.runs:
            sink, expected = run.sink, self.answers[run.entry.sequence]
            assert not sink.faults
            assert sink.ids == expected[: len(sink.ids)], "a token was changed, lost or sent twice"
            assert sink.num_ends <= 1
            assert (run.entry.state is State.ENDED) == bool(sink.num_ends or run.is_cancelled)

    @invariant()
    def the_window_holds(self) -> None:
        assert self.shard.max_ahead <= self.shard.opening.window
        if self.shard.chunks:
            assert self.shard.largest_step <= self.shard.prefill_budget

    # -- and in the end ------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        for _ in range(MOST_ROUNDS):
            if not self._open_runs():
                break
            self._watched(self.link.round)
        self._watched(self.link.run)  # a row whose client has just gone may still kill the shard
        core = self.link.core
        assert not core.rows, "a row waits for ever"
        assert not core.queue, "a request waits for ever"
        self.link.check()
        assert core.allocator.num_available == core.allocator.num_blocks - 1, "blocks are lost"
        for run in self.runs:
            self._check_end(run)

    def _check_end(self, run: Run) -> None:
        sink, error = run.sink, run.sink.error
        breaker = set(BREAKERS).intersection(ids_of(run.request.prompt_ids))
        if error is None:
            check_answer(run, self.answers[run.entry.sequence])
            # What was launched by then, and comes back before the step that kills.
            most = LATER + self.shard.lag * (1 + self.shard.speculated)
            is_early = breaker == {KILLS_LATER} and len(sink.ids) <= most + self.shard.speculated
            assert not breaker or run.is_cancelled or is_early, "it broke its row and did not fail"
            return
        assert sink.num_ends == 1
        if isinstance(error, Overloaded):
            assert not sink.events, "whoever has begun waits on"
            return
        assert isinstance(error, GenerationFailed)
        siblings = run.request.siblings
        family = [other for other in self.runs if siblings is not None and other.request.siblings is siblings]
        deaths = [self.deaths[other.entry.sequence] for other in family or [run]]
        assert breaker or any(one.look_like_its_own for one in deaths), f"it failed for another's fault: {error}"


TestMachine = SchedulerMachine.TestCase
TestMachine.settings = settings(max_examples=140, stateful_step_count=50)


@pytest.mark.soak
def test_many_histories() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=1_500, stateful_step_count=60))
