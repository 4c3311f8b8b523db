"""Bisection over deaths: each poison fails alone, everybody else goes on, and few deaths are needed for it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.scheduling import Link, MemorySink, joined, make_request, submit
from tests.fakes.scripted_shard import PlainShard, ShardDied, alone
from tgi.errors import GenerationFailed
from tgi.router.scheduling.entry import Entry
from tgi.router.scheduling.suspects import PARTS, Suspects
from tgi.router.validation.request import fork

POISON = 49
VOCAB = 49  # of the answers: a poison is in prompts only


def most_deaths(size: int, poisons: int) -> int:
    return poisons * (math.ceil(math.log(size, PARTS)) + 2)


@given(st.integers(1, 70), st.sets(st.integers(0, 69), min_size=1, max_size=3), st.integers(1, 70))
def test_each_poison_is_convicted_and_nobody_else(size: int, chosen: set[int], max_rows: int) -> None:
    poisons = {number % size for number in chosen}
    suspects: Suspects[int] = Suspects()
    waiting, running, convicted = list(range(size)), dict[int, bool](), set[int]()
    deaths = 0
    while waiting or len(running) < size - len(convicted):
        started = [key for key in waiting if not suspects.holds(key)][: max_rows - len(running)]
        if not started:  # the oldest gets to its end
            assert running, "everybody is held back"
            done = next(iter(running))
            running.pop(done)
            suspects.remove(done)
            size -= 1
            continue
        waiting = [key for key in waiting if key not in started]
        running |= dict.fromkeys(started, False)
        if poisons & running.keys():
            deaths += 1
            culprit = suspects.died(running)
            waiting = [*running, *waiting]
            running = {}
            if culprit is not None:
                convicted.add(culprit)
                waiting.remove(culprit)
                suspects.remove(culprit)
            continue
        for key in started:
            running[key] = True
            suspects.clear(key)
    assert convicted == poisons
    assert len(suspects) == 0
    assert deaths <= most_deaths(70, len(poisons))


def test_one_that_a_newcomer_may_have_shielded_runs_alone_before_it_is_convicted() -> None:
    suspects: Suspects[str] = Suspects()
    assert suspects.died({"a": True}) is None, "one death proves nothing"
    assert not suspects.holds("new")
    assert suspects.died({"a": False, "new": False}) is None
    assert suspects.holds("new")
    assert not suspects.holds("a")
    assert suspects.clear("a")
    assert not suspects.holds("new")
    assert suspects.died({"new": False}) == "new"


def test_an_idle_death_blames_nobody() -> None:
    suspects: Suspects[str] = Suspects()
    assert suspects.died({}) is None
    assert len(suspects) == 0


def test_who_is_preempted_on_trial_stays_a_suspect() -> None:
    suspects: Suspects[str] = Suspects()
    everybody = "abcdefghijkl"
    suspects.died(dict.fromkeys(everybody, True))
    assert [key for key in everybody if suspects.holds(key)] == list("cdefghijkl"), "an eighth goes on trial"
    assert suspects.died({"x": True, "b": False}) is None, "`a` has no row at the moment"
    assert not suspects.holds("b")
    assert all(suspects.holds(key) for key in "acdefghijkl")
    for key in "bacdefghijkl":
        assert not suspects.holds(key)
        suspects.clear(key)
    assert len(suspects) == 0


# -- in the scheduler --------------------------------------------------------------------------------------------------


def run_with_deaths(link: Link, shard: PlainShard, renews: bool = True) -> int:
    """Until nothing happens any more. -> deaths"""
    deaths = 0
    while True:
        try:
            link.run()
            return deaths
        except ShardDied:
            deaths += 1
            assert deaths < 40, "it goes on for ever"
            if renews:
                shard.renew_cache(shard.kv_epoch + 1)
            link.open()


def deadly_shard() -> PlainShard:
    shard = PlainShard(num_blocks=800, max_rows=64, prefill_budget=2_000, vocab_size=VOCAB)
    shard.kills = lambda row: POISON in row.ids
    return shard


@pytest.mark.parametrize("at", [[0], [63], [20], [3, 40], [10, 11, 50]])
def test_a_poison_among_64_fails_alone(at: list[int]) -> None:
    shard = deadly_shard()
    link = joined(shard)
    requests = [make_request([n % VOCAB, n // VOCAB, *([POISON] if n in at else [])], 12) for n in range(64)]
    sinks = [submit(link, request)[1] for request in requests]
    deaths = run_with_deaths(link, shard)
    assert deaths <= most_deaths(64, len(at))
    for n, sink in enumerate(sinks):
        assert sink.num_ends == 1
        assert not sink.faults
        if n in at:
            assert isinstance(sink.error, GenerationFailed)
        else:
            assert sink.ids == alone(requests[n], VOCAB)
    stats = link.core.stats
    assert stats.suspects_failed == len(at)
    assert stats.suspects_cleared >= 32
    assert not link.core._suspects
    link.check()


def test_cuts_that_the_shard_survives_blame_nobody_until_they_repeat() -> None:
    shard = deadly_shard()
    link = joined(shard)
    requests = [make_request([n], 12) for n in range(8)]
    sinks = [submit(link, request)[1] for request in requests]
    link.until(lambda: sinks[-1].events)
    link.open()
    assert not link.core._suspects
    _, poison = submit(link, make_request([5, POISON], 12))
    assert run_with_deaths(link, shard, renews=False) <= 3 + most_deaths(9, 1)
    assert isinstance(poison.error, GenerationFailed)
    assert [sink.ids for sink in sinks] == [alone(request, VOCAB) for request in requests]


def test_siblings_are_one_suspect_and_waiters_on_its_prefix_go_on() -> None:
    shard = deadly_shard()
    link = joined(shard)
    prompt = [n % VOCAB for n in range(600)]
    family = fork(make_request([*prompt, POISON], 12), 3)
    good = [make_request([*prompt, n], 12) for n in range(4)]
    entries: list[Entry] = []

    class FamilySink(MemorySink):
        def fail(self, error: Exception) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().fail(error)  # pyright: ignore[reportArgumentType]
            for entry in entries:
                entry.cancel()

    failing = [FamilySink() for _ in family]
    entries += [link.core.submit(sibling, sink) for sibling, sink in zip(family, failing)]
    sinks = [submit(link, request)[1] for request in good]
    assert run_with_deaths(link, shard) <= most_deaths(5, 1)
    assert [sink.ids for sink in sinks] == [alone(request, VOCAB) for request in good]
    assert sum(isinstance(sink.error, GenerationFailed) for sink in failing) == 1
    assert not link.core.queue
    link.check()


def test_a_suspect_whose_client_leaves_lets_the_others_go_on() -> None:
    shard = deadly_shard()
    link = joined(shard)
    asked = [submit(link, make_request([n], 12)) for n in range(12)]
    link.until(lambda: asked[-1][1].events)
    shard.renew_cache(9)
    link.open()
    assert len(link.core.rows) == 2
    for entry, _ in asked[:2]:
        entry.cancel()
    link.run()
    assert all(sink.finish for _, sink in asked[2:])


def test_a_row_whose_client_has_gone_may_be_the_one_that_kills() -> None:
    shard = deadly_shard()
    link = joined(shard)
    poison, _ = submit(link, make_request([POISON], 12))
    request = make_request([1], 12)
    _, sink = submit(link, request)
    with pytest.raises(ShardDied):
        link.run()
    shard.renew_cache(2)
    link.open()  # the first suspect's row is asked for
    poison.cancel()
    link.say()  # and given up, for the second's
    link.hear()
    with pytest.raises(ShardDied):
        link.advance()
    shard.renew_cache(3)
    link.open()
    link.run()
    assert sink.error is None
    assert sink.ids == alone(request, VOCAB)
    link.check()
