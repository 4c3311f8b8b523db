"""Everything that can happen between router and shard, at random: what no order of it may break.

Drives a real SchedulerCore against any ShardUnderTest that answers as `reference` says and checks its own reads. Each
side may lag: commands and steps wait in queues, steps may be merged, streams break, the cache is renewed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.fakes.scheduling import TOKENIZER, Link, MemorySink, ShardUnderTest, make_request, open_text, random_prompt
from tests.fakes.scripted_shard import ids_of
from tgi.router.scheduling.core import SchedulerConfig, SchedulerCore
from tgi.router.scheduling.entry import Entry
from tgi.router.validation.request import ValidRequest, fork
from tgi.shard_client.messages import Grammar, Sampling


@dataclass(frozen=True, slots=True)
class Workload:
    num_blocks: int
    block_size: int
    window: int
    vocab_size: int
    speculated: int = 0
    prefix_caching: bool = True
    longest_prompt: int = 40
    longest_answer: int = 70
    eos_ids: tuple[int, ...] = ()  # of TOKENIZER; ids below vocab_size end answers at random
    next_handle: int = 1
    operations: int = 1_500
    prompt_logprobs: float = 0.05  # of the requests
    siblings: float = 0.1  # of the requests
    patterns: tuple[str, ...] = ()  # under one of them, as a regular expression, answer
    grammars: float = 0.4  # of the requests, if there are any
    breaks: float = 0.003  # per operation
    num_host_blocks: int = 0
    renewals: float = 0.25  # per break: the cache is lost as well


class Run:
    def __init__(self, request: ValidRequest, entry: Entry, sink: MemorySink) -> None:
        self.request = request
        self.entry = entry
        self.sink = sink
        self.is_cancelled = False


def drive(
    shard: ShardUnderTest,
    renew_cache: Callable[[], None],
    answer: Callable[[ValidRequest], list[int]],
    load: Workload,
    seed: int,
) -> SchedulerCore:
    """One random history, then to the end. AssertionError when an answer, a block or a rule is broken.

    `answer(request)` are the tokens of an undisturbed run; only grammars end it by an EOS.
    """
    rng, operator = random.Random(seed), random.Random(seed)
    config = SchedulerConfig(
        load.num_blocks, load.block_size, prefix_caching=load.prefix_caching, speculate=load.speculated
    )
    core = SchedulerCore(config, TOKENIZER, open_text)
    link = Link(core, shard)
    link.open()
    core.rows.next_handle = load.next_handle
    pool_tokens = (load.num_blocks - 1) * load.block_size
    runs: list[Run] = []

    def submit() -> None:
        longest = min(load.longest_prompt, pool_tokens // 2)
        prompt = random_prompt(rng, longest, load.vocab_size)
        if runs and rng.random() < 0.3:
            # The same again, or the next turn of a chat: equal prompts, and prompts that go on from an answer.
            earlier = rng.choice(runs)
            turn = earlier.sink.ids + prompt if rng.random() < 0.5 else []
            prompt = [*ids_of(earlier.request.prompt_ids), *turn][:longest]
        grammar = None
        if load.patterns and rng.random() < load.grammars:
            grammar = Grammar("regex", rng.choice(load.patterns), rng.choice((0, 0, 0, 2)))
        request = make_request(
            prompt,
            rng.randrange(1, max(2, min(load.longest_answer, pool_tokens - len(prompt)))),
            stop=(TOKENIZER.decode([rng.randrange(97, 110)] * 1),) if rng.random() < 0.2 else (),
            priority=rng.choice((0, 0, 0, 1, -1)),
            use_cache=rng.random() < 0.9,
            cache_salt=rng.choice(("", "", "salt")),
            prompt_logprobs=rng.random() < load.prompt_logprobs,
            prompt_top_n=rng.randrange(3),
            grammar=grammar,
            sampling=Sampling(do_sample=True, seed=rng.getrandbits(64)),
        )
        for sibling in fork(request, rng.randrange(2, 6) if rng.random() < load.siblings else 1):
            sink = MemorySink()
            runs.append(Run(sibling, core.submit(sibling, sink), sink))

    def cancel() -> None:
        run = rng.choice(runs)
        siblings = run.request.siblings
        gone = [run]
        if siblings is not None and rng.random() < 0.5:  # the client of them all is gone
            gone = [other for other in runs if other.request.siblings is siblings]
        for one in gone:
            one.is_cancelled = one.is_cancelled or not one.sink.num_ends
            one.entry.cancel()

    def break_stream() -> None:
        if rng.random() < load.renewals:
            renew_cache()
        link.open()

    for _ in range(load.operations):
        choice = rng.random()
        if choice < load.breaks or core.needs_new_stream:
            break_stream()
        elif choice < 0.08:
            submit()
        elif choice < 0.09 and runs:
            cancel()
        elif choice < 0.36:
            link.say()
            link.hear()
        elif choice < 0.68:
            link.advance()
        else:
            # Up to the whole window may lie between what the shard sent and what the router has read.
            link.deliver(rng.choice((1, 1, 1, 2, 5)))
        if rng.random() < 0.05:
            link.check()
        if operator.random() < 0.01:
            core.flush_cache()
            link.check()
    for _ in range(3):  # more than once where the handles run out
        while link.hear() or link.round():
            pass
        link.check()
        if core.needs_new_stream:
            link.open()
    assert not core.rows, "a row waits for ever"
    assert not core.queue, "a request waits for ever"
    assert core.allocator.num_available == load.num_blocks - 1, "blocks are lost"
    for run in runs:
        check_answer(run, answer(run.request))
    for siblings in {run.request.siblings for run in runs} - {None}:
        ends = [run.sink.finish for run in runs if run.request.siblings is siblings]
        assert len({end.num_cached for end in ends if end is not None}) <= 1, "siblings had the same cached before them"
    return core


def check_answer(run: Run, expected: list[int]) -> None:
    """Of a request that is over and did not fail: its tokens, its text, its end, its prompt's logprobs."""
    sink = run.sink
    assert not sink.faults
    assert sink.error is None
    assert sink.ids == expected[: len(sink.ids)], "a token was changed, lost or sent twice"
    if run.is_cancelled:
        assert sink.num_ends == 0, "an event after the client was gone"
        return
    assert sink.num_ends == 1, "every request ends exactly once"
    assert sink.finish is not None
    assert sink.finish.text == sink.text
    assert sink.finish.num_generated == len(sink.ids)
    _check_prompt(run)
    stop = sink.finish.stop
    if stop is None:
        assert sink.ids == expected
    else:
        assert str(stop) in sink.text


def _check_prompt(run: Run) -> None:
    """The shards' prompt logprobs say where a token stands, and their best tokens which of them it is."""
    assert len(run.sink.prompts) == run.request.prompt_logprobs
    for tokens in run.sink.prompts:
        assert [token.id for token in tokens] == ids_of(run.request.prompt_ids)
        assert [token.logprob for token in tokens] == [None, *(-position / 8 for position in range(1, len(tokens)))]
        ranks = range(run.request.prompt_top_n)
        for position, token in enumerate(tokens):
            best = [top.logprob for top in token.top_tokens]
            assert best == ([-position / 8 - rank for rank in ranks] if position else [])
