"""The scheduler against a shard in plain Python: answers, ends, memory, lost streams. No sockets, no clock."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.scheduling import TOKENIZER, Link, MemorySink, joined, make_request, submit
from tests.fakes.scripted_shard import PlainShard, reference
from tests.fakes.tokenizer import BOS_ID, EOS_ID, ids_of
from tgi.enums import FinishReason
from tgi.errors import ContextTooLong, GenerationFailed, InvalidRequest, Overloaded, Unavailable
from tgi.router.backend import Flushed, TokenEvent
from tgi.router.scheduling.core import SchedulerCore
from tgi.router.scheduling.entry import Entry, State
from tgi.router.validation.request import ValidRequest
from tgi.shard_client.messages import RowError, Sampling, Step

VOCAB = 50


def expected(request: ValidRequest, vocab_size: int = VOCAB) -> list[int]:
    return reference(request.prompt_ids, request.stopping.max_new_tokens, vocab_size)


def settle(link: Link) -> None:
    """Run to the end; then every block is free or in the tree."""
    link.run()
    link.check()
    assert not link.core.rows
    assert not link.core.queue
    assert link.core.allocator.num_available == link.core.allocator.num_blocks - 1


def letters(text: str) -> PlainShard:
    """A shard whose answers spell `text`, then EOS."""
    shard = PlainShard(vocab_size=300)
    ids = [*ids_of(text), EOS_ID]
    shard.script = ids
    return shard


@pytest.mark.row("D: Continuous batching")
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False], ids=["radix", "simple"])
def test_requests_run_together_and_get_their_own_answer(lag: int, caching: bool) -> None:
    link = joined(PlainShard(lag=lag), prefix_caching=caching)
    runs = [(request, *submit(link, request)) for request in (make_request(range(n), 4 + n) for n in range(1, 20))]
    settle(link)
    for request, entry, sink in runs:
        assert sink.ids == expected(request)
        assert sink.finish is not None
        assert sink.finish.reason is FinishReason.LENGTH
        assert sink.finish.num_generated == request.stopping.max_new_tokens
        assert sink.finish.text == sink.text == TOKENIZER.decode(sink.ids)
        assert entry.state is State.ENDED
        times = sink.finish.times
        assert times.received <= times.queued <= times.admitted <= times.first_token <= times.finished


@pytest.mark.row("D: Long generations (segments)")
def test_a_long_answer_is_one_answer() -> None:
    link = joined(PlainShard(num_blocks=200))
    request = make_request(range(10), 1_500)
    _, sink = submit(link, request)
    settle(link)
    assert sink.ids == expected(request)
    assert sink.finish is not None
    assert (sink.finish.reason, sink.finish.num_generated) == (FinishReason.LENGTH, 1_500)
    assert sum(len(command.admit) for command in link.shard.log) == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_second_equal_prompt_finds_the_first_ones_prefix_and_answer() -> None:
    link = joined(PlainShard(block_size=4))
    request = make_request(range(20), 9)
    _, first = submit(link, request)
    settle(link)
    computed = link.shard.num_computed  # pyright: ignore[reportAttributeAccessIssue]
    _, second = submit(link, request)
    turn = make_request([*range(20), *first.ids, 1, 2], 4)
    settle(link)
    _, third = submit(link, turn)
    settle(link)
    assert first.ids == second.ids
    assert first.finish is not None and second.finish is not None and third.finish is not None
    assert [finish.num_cached for finish in (first.finish, second.finish, third.finish)] == [0, 16, 28]
    assert link.shard.num_computed - computed < 20 + 9 + 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.fault("llama.cpp#4288")
def test_without_the_cache_nothing_is_read_or_left() -> None:
    link = joined(PlainShard(block_size=4))
    private = make_request(range(20), use_cache=False)
    submit(link, private)
    settle(link)
    _, open_sink = submit(link, make_request(range(20)))
    settle(link)
    _, private_sink = submit(link, private)
    settle(link)
    assert open_sink.finish is not None and private_sink.finish is not None
    assert (open_sink.finish.num_cached, private_sink.finish.num_cached) == (0, 0)


def test_salts_keep_tenants_apart() -> None:
    link = joined(PlainShard(block_size=4))
    cached = []
    for salt in ("a", "b", "", "a"):
        _, sink = submit(link, make_request(range(20), cache_salt=salt))
        settle(link)
        assert sink.finish is not None
        cached.append(sink.finish.num_cached)
    assert cached == [0, 0, 0, 16]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_eos_ends_with_its_token() -> None:
    link = joined(letters("ok"))
    _, sink = submit(link, make_request([1], 20))
    settle(link)
    assert [(event.text, event.special) for event in sink.events] == [("o", False), ("k", False), ("</s>", True)]
    assert sink.finish is not None
    assert (sink.finish.reason, sink.finish.text, sink.finish.num_generated) == (FinishReason.EOS_TOKEN, "ok", 3)


def test_ignored_eos_goes_on() -> None:
    link = joined(letters("ok"))
    _, sink = submit(link, make_request([1], 5, ignore_eos=True))
    settle(link)
    assert len(sink.ids) == 5
    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.LENGTH


def test_eos_beats_length_on_the_last_token() -> None:
    link = joined(letters("ok"))
    _, sink = submit(link, make_request([1], 3))
    settle(link)
    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.EOS_TOKEN


@pytest.mark.parametrize(("include_stop", "text"), [(True, "ab"), (False, "a")])
@pytest.mark.parametrize("stop", [(), ("ax",)], ids=["", "text is held back"])
def test_a_stop_id_is_named_and_shown_as_a_stop_string_is(include_stop: bool, text: str, stop: tuple[str, ...]) -> None:
    link = joined(letters("abc"))
    _, sink = submit(link, make_request([1], 20, stop_ids=(ord("b"),), stop=stop, include_stop=include_stop))
    settle(link)
    assert sink.finish is not None
    assert (sink.finish.reason, sink.finish.stop, sink.finish.num_generated) == (
        FinishReason.STOP_SEQUENCE,
        ord("b"),
        2,
    )
    assert sink.finish.text == sink.text == text


@pytest.mark.parametrize("include_stop", [True, False])
def test_a_special_token_as_stop_id_is_marked_and_no_part_of_the_text(include_stop: bool) -> None:
    shard = letters("")
    shard.script = [*ids_of("a"), BOS_ID, EOS_ID]
    link = joined(shard)
    _, sink = submit(link, make_request([1], 20, stop_ids=(BOS_ID,), include_stop=include_stop))
    settle(link)
    assert sink.finish is not None
    assert (sink.finish.reason, sink.finish.stop, sink.finish.text) == (FinishReason.STOP_SEQUENCE, BOS_ID, "a")
    assert (sink.events[-1].text, sink.events[-1].special) == ("<s>", True)


@pytest.mark.parametrize(
    ("stop", "max_new_tokens", "reason"),
    [
        ("</s>", 20, FinishReason.EOS_TOKEN),
        ("</s>", 3, FinishReason.EOS_TOKEN),
        ("k</s>", 3, FinishReason.EOS_TOKEN),
        ("ok", 2, FinishReason.STOP_SEQUENCE),
        ("no", 2, FinishReason.LENGTH),
    ],
)
def test_eos_beats_a_stop_string_which_beats_length(stop: str, max_new_tokens: int, reason: FinishReason) -> None:
    link = joined(letters("ok"))
    _, sink = submit(link, make_request([1], max_new_tokens, stop=(stop,)))
    settle(link)
    assert sink.finish is not None
    assert (sink.finish.reason, sink.finish.text) == (reason, "ok")
    assert sink.finish.stop == (None if reason is FinishReason.LENGTH else stop)


def test_a_stop_string_within_the_least_length_does_not_end_the_answer() -> None:
    link = joined(letters("one two one"))
    _, sink = submit(link, make_request([1], 40, stop=("one",), include_stop=False, min_new_tokens=3))
    settle(link)
    assert sink.finish is not None
    assert (sink.finish.reason, sink.finish.text) == (FinishReason.STOP_SEQUENCE, "one two ")


@pytest.mark.fault("lmdeploy#3131")
@pytest.mark.parametrize(("include_stop", "text"), [(True, "one two thr"), (False, "one two ")])
@pytest.mark.parametrize("speculated", [0, 4])
def test_a_stop_string_across_tokens_ends_the_row_at_once(include_stop: bool, text: str, speculated: int) -> None:
    shard = letters("one two three four five six seven")
    shard.speculated = speculated
    link = joined(shard)
    _, sink = submit(link, make_request([1], 40, stop=("nothing", "thr"), include_stop=include_stop))
    settle(link)
    assert sink.finish is not None
    assert (sink.finish.reason, sink.finish.stop) == (FinishReason.STOP_SEQUENCE, "thr")
    assert sink.finish.text == sink.text == text
    assert sink.finish.num_generated == len("one two thr"), "the rest of the same Step counts for nothing"
    assert [handle for command in shard.log for handle in command.cancel] == [1]


def test_after_a_stop_string_only_kept_tokens_are_cached() -> None:
    shard = letters("abcdefghijklmnop")
    shard.speculated = 4  # so that its KV goes beyond the stop string
    link = joined(shard)
    _, sink = submit(link, make_request(range(29), 40, stop=("d",)))
    settle(link)
    kept = [*range(29), *sink.ids]
    _, again = submit(link, make_request([*kept, *ids_of("efghijklmnop"), 1], 1))
    link.run()
    assert again.finish is not None
    assert again.finish.num_cached == 32 == len(kept) - 1
    link.check()


def test_text_held_back_for_a_stop_string_goes_out_at_eos() -> None:
    link = joined(letters("so"))
    _, sink = submit(link, make_request([1], 20, stop=("so what",), include_stop=False))
    settle(link)
    assert sink.finish is not None
    assert sink.finish.text == sink.text == "so"
    assert sink.finish.reason is FinishReason.EOS_TOKEN


def test_half_a_character_at_the_end_is_not_lost() -> None:
    shard = letters("a")
    shard.script = [ord("a"), 0xC3]
    link = joined(shard)
    _, sink = submit(link, make_request([1], 2))
    settle(link)
    assert sink.finish is not None
    assert sink.finish.text == sink.text == "a\ufffd"


# -- what comes with tokens --------------------------------------------------------------------------------------------


def test_top_tokens() -> None:
    link = joined(letters("ab"))
    _, sink = submit(link, make_request([1], 3, top_n=2))
    settle(link)
    first = sink.events[0].top_tokens
    assert [(top.id, top.text, top.special) for top in first] == [
        (ord("a"), "a", False),
        (0, TOKENIZER.token_text(0), False),
    ]
    assert [top.special for top in sink.events[2].top_tokens] == [True, False]


@pytest.mark.fault("TGI#2973")
@pytest.mark.parametrize("lost_after", [None, 2])
def test_prompt_logprobs_come_once_and_before_the_first_token(lost_after: int | None) -> None:
    shard = PlainShard(prefill_budget=4, block_size=4)
    link = joined(shard)
    plain = make_request(range(18), 4)
    submit(link, plain)
    settle(link)
    _, sink = submit(link, make_request(range(18), 4, prompt_logprobs=True))
    if lost_after is not None:
        for _ in range(lost_after):
            link.round()
        assert not sink.prompts
        link.open()
    settle(link)
    assert len(sink.prompts) == 1
    assert [token.id for token in sink.prompts[0]] == list(range(18))
    assert [token.logprob for token in sink.prompts[0]] == [None, *(-p / 8 for p in range(1, 18))]
    assert sink.finish is not None
    assert sink.finish.num_cached == 0, "a cached position has no logits"
    assert sink.ids == expected(plain)


@pytest.mark.fault("sglang#2088")
@pytest.mark.parametrize("lost_after", [None, 2])
def test_each_prompt_token_has_its_own_alternatives(lost_after: int | None) -> None:
    """In chunks; and when the row is lost half-way, from the first again."""
    link = joined(PlainShard(prefill_budget=4, block_size=4))
    _, sink = submit(link, replace(make_request(range(18), 4, prompt_logprobs=True), prompt_top_n=2))
    for _ in range(lost_after or 0):
        link.round()
    if lost_after is not None:
        link.open()
    settle(link)
    (tokens,) = sink.prompts
    assert tokens[0].top_tokens == ()
    for position, token in enumerate(tokens[1:], 1):
        assert [(top.id, top.logprob) for top in token.top_tokens] == [
            (position, -position / 8),
            (position + 1, -position / 8 - 1),
        ]
        assert token.top_tokens[0].text == TOKENIZER.token_text(position)


def test_prompt_logprobs_are_not_asked_for_again() -> None:
    shard = PlainShard(prefill_budget=64)
    link = joined(shard)
    _, sink = submit(link, replace(make_request(range(18), 8, prompt_logprobs=True), prompt_top_n=2))
    link.until(lambda: sink.events)
    link.open()
    settle(link)
    admits = [admit for command in shard.log for admit in command.admit]
    assert [(admit.prompt_logprobs, admit.prompt_top_n) for admit in admits] == [(True, 2), (False, 0)]
    assert len(sink.prompts) == 1


@pytest.mark.fault("llama.cpp#7381")
def test_the_seed_is_reported_when_it_mattered() -> None:
    link = joined()
    sampled = ValidRequest(make_request().prompt_ids, Sampling(do_sample=True, seed=7), make_request().stopping)
    _, sink = submit(link, sampled)
    _, greedy = submit(link, make_request())
    settle(link)
    assert sink.finish is not None and greedy.finish is not None
    assert (sink.finish.seed, greedy.finish.seed) == (7, None)


# -- refusals and failures ---------------------------------------------------------------------------------------------


def test_what_could_not_run_alone_is_refused_with_the_numbers() -> None:
    link = joined(PlainShard(num_blocks=5, block_size=4))
    with pytest.raises(ContextTooLong, match=r"<= 16.*10 `inputs` tokens and 7 `max_new_tokens`"):
        submit(link, make_request(range(10), 7))
    with pytest.raises(InvalidRequest):
        submit(link, make_request([], 7))
    with pytest.raises(InvalidRequest):
        submit(link, make_request([1], 0))
    _, sink = submit(link, make_request(range(10), 6))
    settle(link)
    assert len(sink.ids) == 6


@pytest.mark.row("D: Error path and cache clearing")
def test_one_poison_fails_alone_and_leaves_nothing_in_the_cache() -> None:
    shard = PlainShard(block_size=4)
    shard.poison_ids = frozenset({49})
    link = joined(shard)
    good = make_request(range(10), 8)
    sinks = [submit(link, good)[1] for _ in range(6)]
    _, bad = submit(link, make_request([49] * 12, 8))
    settle(link)
    assert isinstance(bad.error, GenerationFailed)
    assert str(bad.error) == "the forward failed"
    assert not bad.events
    assert all(sink.ids == expected(good) for sink in sinks if 49 not in expected(good))
    assert bad.num_ends == 1


def test_nan_is_that_rows_error() -> None:
    shard = PlainShard(block_size=4)
    shard.nan_ids = frozenset({47})
    link = joined(shard)
    _, bad = submit(link, make_request([47] * 12, 8))
    settle(link)
    assert isinstance(bad.error, GenerationFailed)
    assert not bad.events
    assert link.core.allocator.num_free == link.core.allocator.num_blocks - 1, "its KV is not shared"


def test_what_failed_late_shares_no_more_than_it_had() -> None:
    """What made it fail may be in its KV: blocks computed since the prompt are not offered to others."""
    request = make_request(range(12), 20)
    answer = expected(request)
    late = next(n for n in range(6, 20) if answer[n] not in [*range(12), *answer[:n]])
    shard = PlainShard(block_size=4)
    shard.nan_ids = frozenset({answer[late]})
    link = joined(shard)
    _, bad = submit(link, request)
    settle(link)
    assert isinstance(bad.error, GenerationFailed)
    assert bad.ids == answer[:late]
    assert link.core.allocator.num_free == link.core.allocator.num_blocks - 1 - 3


class BrokenSink(MemorySink):
    def __init__(self, good_events: int) -> None:
        super().__init__()
        self.good_events = good_events

    def token(self, event: TokenEvent) -> None:
        super().token(event)
        if len(self.events) > self.good_events:
            raise RuntimeError("no one is there")


@pytest.mark.parametrize("good_events", [0, 3, 7])
def test_a_sink_that_raises_fails_alone(good_events: int, caplog: pytest.LogCaptureFixture) -> None:
    link = joined()
    broken = BrokenSink(good_events)
    link.core.submit(make_request(range(5), 8), broken)
    _, sink = submit(link, make_request(range(6), 8))
    settle(link)
    assert len(broken.events) == good_events + 1
    assert broken.num_ends == 1
    assert sink.ids == expected(make_request(range(6), 8))
    assert "its request fails" in caplog.text


def test_shutdown_answers_everybody() -> None:
    link = joined(PlainShard(max_rows=2))
    sinks = [submit(link, make_request(range(5), 8))[1] for _ in range(5)]
    link.round()
    link.core.fail_all(Unavailable("the server is shutting down"))
    assert all(isinstance(sink.error, Unavailable) and sink.num_ends == 1 for sink in sinks)
    settle(link)


def test_the_queue_timeout_spares_those_who_ran() -> None:
    now = 0.0
    link = joined(PlainShard(max_rows=1), queue_timeout_s=10.0)
    link.core._clock = lambda: now
    (first, first_sink), (_, second_sink) = submit(link, make_request(range(5), 30)), submit(link, make_request([1], 4))
    link.round()
    link.round()
    assert first.state is State.LIVE
    link.core.stream_lost()
    now = 9.0
    link.core.expire()
    assert second_sink.error is None
    now = 10.5
    link.core.expire()
    assert isinstance(second_sink.error, Overloaded)
    assert first_sink.error is None
    link.open()
    settle(link)
    assert len(first_sink.ids) == 30


# -- clients that go ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("TGI#2192")
@pytest.mark.row("D: Filtering finished / disconnected")
@pytest.mark.parametrize("moment", ["queued", "prefill", "decoding", "ended"])
def test_a_client_that_goes_frees_everything_at_once(moment: str) -> None:
    shard = PlainShard(max_rows=1 if moment == "queued" else 4, prefill_budget=8)
    link = joined(shard)
    if moment == "queued":
        submit(link, make_request(range(5), 40))
        link.round()
    entry, sink = submit(link, make_request(range(30), 20))
    if moment == "prefill":
        link.round()
        link.round()
        assert entry.state is State.LIVE
        assert not entry.decoding
    link.until(lambda: moment != "decoding" or sink.events)
    if moment == "ended":
        settle(link)
    before = len(sink.events)
    entry.cancel()
    entry.cancel()
    assert entry.state is State.ENDED
    assert entry.allocation is None
    link.check()
    stats = link.core.stats
    assert stats.queue_size == 0
    if moment in ("prefill", "decoding"):
        assert link.core.allocator.num_available == link.core.allocator.num_blocks - 1
        link.say()
        assert link.commands[-1].cancel == [1]
    settle(link)
    assert len(sink.events) == before
    assert sink.error is None
    assert stats.dropped == (moment != "ended")
    assert (stats.queue_size, stats.batch_current_size, stats.batch_current_max_tokens) == (0, 0, 0)


def test_a_sink_may_cancel_from_within_an_event() -> None:
    link = joined(PlainShard(speculated=4))

    class Leaving(MemorySink):
        def token(self, event: TokenEvent) -> None:
            super().token(event)
            if len(self.events) == 2:
                entry.cancel()

    sink = Leaving()
    entry = link.core.submit(make_request(range(5), 30), sink)
    settle(link)
    assert len(sink.events) == 2


# -- lost streams ------------------------------------------------------------------------------------------------------


@pytest.mark.fault("TGI#2593")
@pytest.mark.parametrize("rounds", range(12))
@pytest.mark.parametrize("renewed", [False, True], ids=["same cache", "new cache"])
def test_a_lost_stream_costs_nobody_anything(rounds: int, renewed: bool) -> None:
    shard = PlainShard(block_size=4, prefill_budget=16)
    link = joined(shard)
    runs = [(request, *submit(link, request)) for request in (make_request(range(4 * n), 9) for n in range(1, 6))]
    for _ in range(rounds):
        link.round()
    if renewed:
        shard.renew_cache(2)
    before = [(entry.admitted_at, entry.first_token_at, entry.cached_len) for _, entry, _ in runs]
    link.open()
    settle(link)
    for (request, entry, sink), moments in zip(runs, before):
        after = (entry.admitted_at, entry.first_token_at, entry.cached_len)
        assert all(then in (None, now) for then, now in zip(moments, after)), "the first of each counts"
        assert sink.ids == expected(request)
        assert sink.num_ends == 1
        assert sink.finish is not None
        assert sink.finish.text == sink.text


def test_the_tree_stays_with_its_epoch() -> None:
    shard = PlainShard(block_size=4)
    link = joined(shard)
    cached = []
    for renewed in (False, False, True):
        if renewed:
            shard.renew_cache(2)
        link.open()
        _, sink = submit(link, make_request(range(20), 4))
        settle(link)
        assert sink.finish is not None
        cached.append(sink.finish.num_cached)
    assert cached == [0, 16, 0]


def test_a_cache_renewed_under_the_stream_starts_everybody_over() -> None:
    shard = PlainShard(block_size=4, lag=0)
    link = joined(shard)
    request = make_request(range(20), 9)
    _, sink = submit(link, request)
    link.until(lambda: len(sink.ids) >= 3)
    shard.renew_cache(2)
    for handle in list(shard.rows):
        shard._end(handle)
    step = shard._step(shard.number)
    link.core.handle_step(step)
    settle(link)
    assert sink.ids == expected(request)


@pytest.mark.parametrize("place", ["allocate", "admit_message"])
def test_a_fault_of_ours_in_the_middle_of_an_admission_is_forgotten(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-made decisions must not reach the next stream: they name blocks that belong to others by then."""
    link = joined()
    runs = [(request, *submit(link, request)) for request in (make_request(range(4 * n), 9) for n in range(1, 4))]
    owner = link.core.allocator if place == "allocate" else Entry
    whole, calls = getattr(owner, place), 0

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a fault of ours")
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, place, fails_once)
    with pytest.raises(RuntimeError):
        link.core.next_command()
    link.core.stream_lost(keep_memory=False)
    assert len(link.core.queue) == len(runs)
    link.open()
    assert [admit.handle for admit in link.commands[0].admit] == [entry.handle for entry in link.core.rows]
    settle(link)
    for request, _, sink in runs:
        assert sink.ids == expected(request)
        assert (sink.num_ends, sink.faults) == (1, [])


def test_who_outlives_no_shard_fails_in_the_end() -> None:
    link = joined()
    _, sink = submit(link, make_request(range(5), 8))
    for _ in range(20):
        link.say()
        link.hear()
        link.open()
    assert isinstance(sink.error, GenerationFailed)
    settle(link)


def test_less_memory_after_a_restart_fails_only_who_no_longer_fits() -> None:
    shard = PlainShard(num_blocks=20, block_size=4)
    link = joined(shard)
    _, large = submit(link, make_request(range(20), 40))
    _, small = submit(link, make_request(range(20), 8))
    link.round()
    link.shard = PlainShard(num_blocks=10, block_size=4, kv_epoch=9)
    link.open()
    settle(link)
    assert isinstance(large.error, GenerationFailed)
    assert small.ids == expected(make_request(range(20), 8))


def test_the_last_handle_opens_a_new_stream() -> None:
    link = joined(PlainShard(max_rows=2), next_handle=(1 << 64) - 3)
    sinks = [submit(link, make_request(range(n), 5))[1] for n in range(1, 7)]
    link.run()
    assert sum(sink.num_ends for sink in sinks) == 3
    assert link.core.needs_new_stream
    link.open()
    settle(link)
    assert [sink.ids for sink in sinks] == [expected(make_request(range(n), 5)) for n in range(1, 7)]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_stats_count_what_happened() -> None:
    seen: list[tuple[str, float, str | None]] = []
    link = joined(PlainShard(block_size=4))
    link.core.stats.observe = lambda name, value, method, times=1: seen.append((name, value, method))
    for _ in range(2):
        submit(link, make_request(range(20), 5))
        settle(link)
    stats = link.core.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (40, 16, 10)
    assert stats.inference_count == stats.inference_success
    assert stats.inference_count["prefill"] == 2
    assert stats.inference_count["decode"] >= 8
    names = {name for name, _, _ in seen}
    assert names == {
        "tgi_batch_next_size",
        "tgi_batch_inference_duration",
        "tgi_batch_forward_duration",
        "tgi_batch_decode_duration",
        "tgi_batch_filter_duration",
        "tgi_request_skipped_tokens",
        "tgi_request_inter_token_duration",
    }
    assert all(method in ("prefill", "decode") for name, _, method in seen if name.endswith(("forward_duration",)))
    assert all(math.isfinite(value) for _, value, _ in seen)


def test_speculation_tells_how_many_tokens_each_step_skipped() -> None:
    skipped: list[float] = []
    link = joined(PlainShard(speculated=4))
    link.core.stats.observe = lambda name, value, method, times=1: (
        skipped.extend([value] * times) if name == "tgi_request_skipped_tokens" else None
    )
    request = make_request(range(5), 60)
    _, sink = submit(link, request)
    settle(link)
    assert sink.ids == expected(request)
    assert sum(skipped) + len(skipped) == 60
    assert all(0 <= value <= 4 for value in skipped)
    assert max(skipped) > 0


class Ticking:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def gaps_of(core: SchedulerCore) -> list[tuple[float, int]]:
    """What the core will say of the time between tokens: (seconds, how many times)."""
    gaps: list[tuple[float, int]] = []
    core.stats.observe = lambda name, value, method, times=1: (
        gaps.append((value, times)) if name == "tgi_request_inter_token_duration" else None
    )
    return gaps


def test_gaps_between_tokens_are_told_once_a_step() -> None:
    clock = Ticking()
    link = joined(PlainShard(max_rows=4), clock=clock)
    core, gaps = link.core, gaps_of(link.core)
    for start in range(3):
        submit(link, make_request(range(start, start + 5), 6, ignore_eos=True))
    link.until(lambda: core.stats.generated_tokens >= 3)
    assert gaps == [], "a first token follows none"
    while core.rows:
        clock.now += 0.25
        link.round()
    assert sum(times for _, times in gaps) == 3 * (6 - 1)
    assert gaps == [(0.25, 3)] * 5, "one value for all rows of a Step"


def test_a_gap_holds_the_time_that_a_lost_stream_costs() -> None:
    clock = Ticking()
    link = joined(clock=clock)
    core, gaps = link.core, gaps_of(link.core)
    submit(link, make_request(range(5), 6, ignore_eos=True))
    link.until(lambda: core.stats.generated_tokens == 2)
    clock.now += 7
    link.open()
    settle(link)
    assert [gap for gap, _ in gaps if gap] == [7.0]
    assert sum(times for _, times in gaps) == 5


def test_streams_and_restarts_are_counted() -> None:
    shard = PlainShard()
    link = joined(shard)
    stats = link.core.stats
    assert (stats.reconnects, stats.restarts) == (0, 0)
    link.open()
    assert (stats.reconnects, stats.restarts) == (1, 0)
    shard.renew_cache(77)
    link.open()
    assert (stats.reconnects, stats.restarts) == (2, 1)
    link.core.stream_lost(keep_memory=False)
    link.open()
    assert (stats.reconnects, stats.restarts) == (3, 1), "our own fault is no restart"


def test_blocks_are_live_cached_or_free_and_evictions_outlive_an_allocator() -> None:
    shard = PlainShard(num_blocks=21, block_size=4)
    link = joined(shard)
    stats = link.core.stats
    entry, _ = submit(link, make_request(range(20), 30))
    link.until(lambda: entry.decoding)
    assert stats.blocks_live == link.core.allocator.num_blocks - 1 - link.core.allocator.num_available > 0
    settle(link)
    assert (stats.blocks_live, stats.evicted_blocks) == (0, 0)
    assert stats.blocks_cached > 0
    assert stats.blocks_cached + stats.blocks_free == 20
    submit(link, make_request(range(50, 100), 20))
    settle(link)
    evicted = stats.evicted_blocks
    assert evicted > 0
    shard.renew_cache(77)
    link.open()
    assert (stats.evicted_blocks, stats.blocks_free) == (evicted, 20)


# -- an operator empties the cache -------------------------------------------------------------------------------------


def test_flush_forgets_what_nobody_uses_and_disturbs_nobody() -> None:
    link = joined(PlainShard(num_blocks=60, block_size=4))
    submit(link, make_request(range(40), 4))
    settle(link)
    cached = link.core.stats.blocks_cached
    running = make_request(range(80, 100), 30, ignore_eos=True)
    entry, sink = submit(link, running)
    link.until(lambda: len(sink.ids) >= 5)
    live = link.core.stats.blocks_live
    assert link.core.flush_cache() == Flushed(cached, live)
    assert (link.core.stats.blocks_cached, link.core.stats.blocks_live) == (0, live)
    assert link.core.stats.evicted_blocks == 0, "nobody took them"
    link.check()
    assert link.core.flush_cache() == Flushed(0, live)
    assert entry.state is State.LIVE
    settle(link)
    assert sink.ids == expected(running)
    again, _ = submit(link, make_request(range(40), 4))
    settle(link)
    assert again.cached_len == 0


def test_flush_without_a_cache() -> None:
    link = joined(PlainShard(block_size=4), prefix_caching=False)
    submit(link, make_request(range(40), 4))
    settle(link)
    assert link.core.flush_cache() == Flushed(0, 0)


@pytest.mark.parametrize(
    ("code", "kind", "param"),
    [
        ("invalid", InvalidRequest, None),
        ("grammar", InvalidRequest, "grammar"),
        ("generation", GenerationFailed, None),
        ("out_of_memory", GenerationFailed, None),  # it ran alone: no fault of the load
        ("nan", GenerationFailed, None),
        ("a code of tomorrow", GenerationFailed, None),
    ],
)
@pytest.mark.parametrize("message", ["it does not work", ""])
def test_a_rows_error_says_whose_fault_it_was(
    code: str, kind: type[Exception], param: str | None, message: str
) -> None:
    link = joined(PlainShard())
    entry, sink = submit(link, make_request(range(5), 50))
    _, other = submit(link, make_request(range(9), 5))
    link.say()
    shard = link.shard
    assert isinstance(shard, PlainShard)
    link.core.handle_step(Step(1, shard.kv_epoch, errors=[RowError(entry.handle, code, message)]))
    assert type(sink.error) is kind
    assert str(sink.error) == (message or code)
    assert getattr(sink.error, "param", None) == param
    assert other.error is None
    assert entry.state is State.ENDED


def test_who_wants_more_than_a_new_shard_allows_fails_and_the_others_go_on() -> None:
    link = joined(PlainShard(num_blocks=200))
    request = make_request(range(10), 40)
    runs = [submit(link, make_request(range(10), 300)), submit(link, request)]
    link.until(lambda: len(runs[0][1].ids) > 5)
    link.core.stream_lost()
    link.core.limit_lengths(50)
    link.open()
    settle(link)
    assert isinstance(runs[0][1].error, GenerationFailed)
    assert runs[1][1].ids == expected(request)
    with pytest.raises(ContextTooLong, match="must be <= 50"):
        submit(link, make_request(range(11), 40))
