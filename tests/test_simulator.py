"""The simulator counts right, and its baseline is the policy that it says. Figures are not judged, only their order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import traces
from benchmarks.simulator import __main__ as simulator
from benchmarks.simulator.machine import CPU, H200, Machine, Work
from benchmarks.simulator.on_demand import OnDemand
from benchmarks.simulator.replay import Answer, Clock, Counts, Outcome, System, Usage, percentile, replay
from benchmarks.simulator.reserve import SEGMENT, ReserveUpFront
from benchmarks.traces import Conversation, Lengths, Trace, Turn
from tgi.server.engine import warmup

LIMIT = 2_048
SMALL = replace(H200, pool_tokens=4_096, max_total_tokens=LIMIT, max_batch_prefill_tokens=512)
ROOMY = replace(SMALL, pool_tokens=1 << 15)
Policy = type[OnDemand] | type[ReserveUpFront]
POLICIES: list[Policy] = [OnDemand, ReserveUpFront]
GENERATORS: dict[str, Callable[[int], Trace]] = {
    "poisson": lambda seed: traces.poisson(seed, requests=40, rate=200, limit=LIMIT),
    "bursts": lambda seed: traces.bursts(seed, requests=40, size=20, every_s=1, limit=LIMIT),
    "chats": lambda seed: traces.chats(seed, requests=40, rate=20, limit=LIMIT),
    "documents": lambda seed: traces.documents(seed, requests=30, rate=100, limit=LIMIT),
    "flooded": lambda seed: traces.flooded(seed, requests=40, rate=200, limit=LIMIT),
    "ranked": lambda seed: traces.ranked(seed, requests=40, rate=200, limit=LIMIT),
    "shared": lambda seed: traces.shared_prompts(seed, requests=30, rate=100, apps=3, limit=LIMIT),
}


def run(policy: Policy, trace: Trace, machine: Machine = SMALL, check_every: int = 50) -> Outcome:
    clock = Clock()
    return replay(trace, machine, policy(machine, clock, trace.lengths_known), clock, check_every)


def ids(count: int, seed: int = 0) -> bytes:
    return traces.Random(seed).randbytes(4 * count)


def at_once(*turns: Turn) -> Trace:
    return Trace(tuple(Conversation(0.0, (turn,)) for turn in turns))


# -- traces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generate", GENERATORS.values(), ids=GENERATORS)
def test_a_trace_is_a_function_of_its_seed(generate: Callable[[int], Trace]) -> None:
    assert generate(1) == generate(1)
    assert generate(1) != generate(2)


@pytest.mark.parametrize("generate", GENERATORS.values(), ids=GENERATORS)
def test_a_trace_is_one_that_the_server_takes(generate: Callable[[int], Trace]) -> None:
    trace = generate(1)
    times = [conversation.begins_s for conversation in trace.conversations]
    assert times == sorted(times)
    assert times[0] == 0
    for turn in trace.turns:
        assert turn.num_prompt >= 1
        assert turn.num_answer >= 1
        assert turn.num_prompt + turn.num_answer <= LIMIT


@pytest.mark.parametrize("scenario", simulator.SCENARIOS, ids=lambda scenario: scenario.name)
def test_answers_are_short_in_the_mean_and_long_in_the_tail(scenario: simulator.Scenario) -> None:
    lengths = sorted(turn.num_answer for turn in scenario.trace().turns)
    mean = sum(lengths) / len(lengths)
    # TGI reserves a segment where the limit is larger: a quarter of that is the stricter reading.
    assert mean <= min(scenario.machine.max_total_tokens, SEGMENT) / 4
    assert lengths[len(lengths) // 2] < 0.75 * mean
    assert lengths[-1] > 5 * mean


def test_a_later_turn_begins_with_what_was_said() -> None:
    talks = [talk for talk in GENERATORS["chats"](1).conversations if len(talk.turns) > 1]
    assert talks
    for talk in talks:
        for before, after in zip(talk.turns, talk.turns[1:]):
            assert after.prompt.startswith(before.prompt + before.answer)
            assert after.pause_s > 0


def test_applications_share_their_system_prompts_and_nothing_else() -> None:
    trace = traces.shared_prompts(1, requests=100, rate=100, apps=3, limit=LIMIT)
    assert len(trace.conversations) == 100
    prompts = [turn.prompt for turn in trace.turns]
    systems = {prompt[: traces.SYSTEM_PROMPT * 4] for prompt in prompts}
    assert len(systems) == 3
    assert len(set(prompts)) == len(prompts)


def test_known_lengths_change_nothing_else() -> None:
    trace = GENERATORS["poisson"](1)
    assert traces.known(trace).conversations == trace.conversations
    assert traces.known(trace).lengths_known


def test_lengths_keep_their_mean() -> None:
    random = traces.Random(1)
    drawn = [Lengths(200, 1.0).draw(random) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(200, rel=0.05)


# -- machines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "rows", "context", "measured_ms"),
    [
        *((H200, rows, 200, ms) for rows, ms in ((1, 4.9), (32, 5.46), (128, 6.82), (256, 10.42))),
        *((CPU, rows, 190, ms) for rows, ms in ((1, 19.0), (8, 28.0), (16, 41.3), (32, 68.6))),
    ],
)
def test_a_step_takes_about_what_was_measured(machine: Machine, rows: int, context: int, measured_ms: float) -> None:
    assert machine.seconds(Work(rows, rows * context, 0)) * 1e3 == pytest.approx(measured_ms, rel=0.15)


@pytest.mark.parametrize("machine", [H200, CPU])
def test_the_engine_would_plan_so_after_warm_up(machine: Machine) -> None:
    assert machine.gap_s == warmup.GAP_S["cuda" if machine is H200 else "cpu"]
    rate = 1 / machine.prefill_s
    gap_tokens = max(machine.block_size, int(rate * machine.gap_s))
    assert machine.budget == warmup.prefill_budget(machine.max_batch_prefill_tokens, gap_tokens, rate, True)
    steps = math.floor(warmup.RUN_AHEAD_S / machine.seconds(Work(1, 0, 0)))
    assert machine.window == min(max(steps, warmup.WINDOW_RANGE[0]), warmup.WINDOW_RANGE[1])


# -- the replay --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths_known", [False, True], ids=["unset", "known"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("generate", GENERATORS.values(), ids=GENERATORS)
def test_every_request_ends_once_with_its_tokens(
    generate: Callable[[int], Trace], policy: Policy, lengths_known: bool
) -> None:
    trace = traces.known(generate(1)) if lengths_known else generate(1)
    outcome = run(policy, trace)  # which holds every answer to the trace, and the allocator to its check()
    answers, counts = outcome.answers, outcome.counts
    assert sum(answer.num_tokens for answer in answers) == sum(turn.num_answer for turn in trace.turns)
    assert counts.generated_tokens == len(counts.gaps_s) + len(answers)
    assert counts.prompt_tokens == sum(turn.num_prompt for turn in trace.turns)
    assert counts.prompt_tokens <= counts.prefill_tokens + counts.cached_tokens
    for answer in answers:
        assert answer.arrived_s <= answer.admitted_s < answer.first_token_s <= answer.last_token_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lag", [0, 1])
def test_with_memory_for_all_each_position_is_computed_once(policy: Policy, lag: int) -> None:
    trace = traces.known(traces.chats(3, requests=40, rate=50, limit=1_024))
    counts = run(policy, trace, replace(ROOMY, lag=lag)).counts
    assert counts.preemptions == 0
    assert counts.recomputed_tokens == 0
    assert counts.cached_tokens + counts.prefill_tokens == counts.prompt_tokens
    assert counts.cached_tokens > 0


def test_without_a_prefix_cache_all_is_computed() -> None:
    trace, clock = GENERATORS["shared"](1), Clock()
    counts = replay(trace, ROOMY, OnDemand(ROOMY, clock, False, prefix_caching=False), clock).counts
    assert counts.cached_tokens == 0
    assert counts.prefill_tokens == counts.prompt_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_is_deterministic(policy: Policy) -> None:
    first, second = (run(policy, GENERATORS["chats"](1)) for _ in range(2))
    assert first.counts == second.counts
    assert (first.took_s, first.steps, first.running) == (second.took_s, second.steps, second.running)


def test_preempted_requests_go_on_with_their_tokens() -> None:
    outcome = run(OnDemand, at_once(*(Turn(ids(40, seed), ids(600, 100 + seed)) for seed in range(24))), check_every=1)
    assert outcome.counts.preemptions > 0
    assert outcome.held <= 1


def test_a_single_request_takes_what_its_steps_take() -> None:
    outcome = run(OnDemand, at_once(Turn(ids(100), ids(3))), ROOMY)
    prefill, decode = Work(0, 100, 100), [Work(1, 101, 0), Work(1, 102, 0)]
    assert outcome.first_token_s(50) == pytest.approx(ROOMY.seconds(prefill))
    assert outcome.answers[0].last_token_s == pytest.approx(sum(map(ROOMY.seconds, [prefill, *decode])))


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert [percentile([3, 1, 2, 4], percent) for percent in (0, 50, 99, 100)] == [1, 2, 4, 4]


class Liar:
    """Ends its only request at once, `times` times, with one token."""

    def __init__(self, times: int) -> None:
        self.counts = Counts()
        self._answers: list[Answer] = []
        self._times = times

    def submit(self, answer: Answer) -> None:
        self._answers.append(answer)

    def begin(self) -> Work | None:
        return Work(1, 1, 0) if self._answers else None

    def finish(self) -> Sequence[Answer]:
        answer = self._answers.pop()
        self.counts.add_token(answer, 0.0)
        return [answer] * self._times

    def usage(self) -> Usage:
        return Usage(1, 0, 0)

    def check(self) -> None:
        pass


def test_a_system_that_loses_or_doubles_something_is_found_out() -> None:
    def lie(times: int, num_answer: int) -> None:
        system: System = Liar(times)
        replay(at_once(Turn(ids(5), ids(num_answer))), SMALL, system, Clock())

    lie(times=1, num_answer=1)
    with pytest.raises(AssertionError, match="ended 2 times"):
        lie(times=2, num_answer=1)
    with pytest.raises(AssertionError, match="another answer"):
        lie(times=1, num_answer=2)


# -- the baseline ------------------------------------------------------------------------------------------------------


class Watched(ReserveUpFront):
    """Holds every step to the limits that TGI works under."""

    def begin(self) -> Work | None:
        before = {id(segment) for segment in self.batch}
        waiting = [segment.answer.index for segment in self.queue]
        work = super().begin()
        newcomers = [segment for segment in self.batch if id(segment) not in before]
        assert [segment.answer.index for segment in newcomers] == waiting[: len(newcomers)], "first come, first served"
        if work is not None:
            # A full batch may leave nothing for prompts: each then reads one token, whatever the budget says.
            most = SMALL.max_batch_prefill_tokens + len(self.batch)
            assert work.prefill_tokens + work.decode_rows <= most
            assert sum(segment.chunk for segment in newcomers) <= SMALL.max_batch_prefill_tokens
        for segment in self.batch:
            assert segment.allocation is not None
            assert segment.allocation.num_blocks >= segment.room, "all of it is there from the start"
            assert segment.computed + segment.chunk <= segment.room
            assert segment.max_new <= SEGMENT
        return work


@pytest.mark.parametrize("generate", GENERATORS.values(), ids=GENERATORS)
def test_the_baseline_obeys_its_budgets(generate: Callable[[int], Trace]) -> None:
    clock = Clock()
    replay(generate(2), SMALL, Watched(SMALL, clock, False), clock, check_every=50)


def test_the_baseline_reserves_up_front_and_makes_all_wait_behind_one() -> None:
    system = ReserveUpFront(SMALL, Clock(), False)
    turns = [
        Turn(ids(1_000), ids(5)),
        Turn(ids(1_000, 1), ids(5)),
        Turn(ids(900, 2), ids(5)),
        Turn(ids(1_900, 3), ids(1)),
    ]
    for index, turn in enumerate(turns):
        system.submit(Answer(index, Conversation(0.0, (turn,)), 0, 0.0))
    while len(system.batch) < 2:
        assert system.begin()
        system.finish()
    system.begin()
    # Two hold 2,023 tokens each; the third would need 1,923, and the fourth, which has to wait behind it, 2,047.
    assert [segment.answer.index for segment in system.queue] == [2, 3]
    assert system.usage().held_tokens == 2 * (1_000 + SEGMENT - 1)


def test_the_baseline_shares_a_prompt_only_after_its_first_user() -> None:
    prompt = ids(512)
    early = Conversation(0.0, (Turn(prompt, ids(20, 1)),))
    beside = Conversation(0.001, (Turn(prompt, ids(20, 2)),))
    late = Conversation(100.0, (Turn(prompt, ids(20, 3)),))
    counts = run(ReserveUpFront, Trace((early, beside, late)), ROOMY).counts
    assert counts.cached_tokens == 511
    ours = run(OnDemand, Trace((early, beside, late)), ROOMY).counts
    assert ours.cached_tokens == 2 * 496  # whole blocks, and one position is always computed


def test_the_baseline_queues_a_long_answer_again_every_1024_tokens() -> None:
    outcome = run(ReserveUpFront, at_once(Turn(ids(10), ids(1_500))))
    # The prompt is in the cache, the 1,024 tokens generated are read again; the last of them is computed anew.
    assert outcome.counts.recomputed_tokens == SEGMENT - 1
    assert outcome.counts.prefill_tokens == 10 + SEGMENT
    assert run(ReserveUpFront, at_once(Turn(ids(10), ids(SEGMENT)))).counts.recomputed_tokens == 0


def test_the_baseline_joins_newcomers_and_then_steps_without() -> None:
    clock = Clock()
    system = ReserveUpFront(ROOMY, clock, True)
    for index in range(3):
        turn = Turn(ids(10, index), ids(50))
        system.submit(Answer(index, Conversation(0.0, (turn,)), 0, 0.0))
        system.begin()
        system.finish()
    # The first starts the batch, the second joins it, the third waits for the step in between.
    assert (len(system.batch), len(system.queue)) == (2, 1)
    system.begin()
    assert (len(system.batch), len(system.queue)) == (3, 0)


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_ours_runs_more_and_computes_less() -> None:
    ours, baseline = simulator.compare(traces.chats(1, requests=100, rate=40, limit=LIMIT), SMALL)
    assert ours.running > baseline.running
    assert ours.unused < baseline.unused
    ours, baseline = simulator.compare(traces.shared_prompts(1, requests=60, rate=50, apps=4, limit=LIMIT), ROOMY)
    assert ours.counts.prefill_tokens < baseline.counts.prefill_tokens
    assert ours.hit_rate > baseline.hit_rate


def test_a_quiet_client_and_an_urgent_request_wait_less() -> None:
    ours, baseline = simulator.compare(traces.flooded(1, requests=200, rate=60, limit=LIMIT), SMALL)
    quiet, flood = ("quiet", 0), ("flood", 0)
    assert ours.groups == [flood, quiet]
    assert 2 * ours.wait_s(50, quiet) < ours.wait_s(50, flood)
    assert ours.wait_s(50, quiet) < baseline.wait_s(50, quiet)
    ours, _ = simulator.compare(traces.ranked(1, requests=200, rate=60, limit=LIMIT), SMALL)
    assert 2 * ours.wait_s(50, ("", 1)) < ours.wait_s(50, ("", 0))


def test_the_record_has_every_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "simulator.json"
    monkeypatch.setattr("sys.argv", ["simulator", "--scale", "0.02", "--json", str(path)])
    simulator.main()
    record = json.loads(path.read_text())
    assert record["command"] == "python -m benchmarks.simulator --scale 0.02"
    names = [figure["figure"] for figure in record["figures"]]
    for scenario in simulator.SCENARIOS:
        assert f"{scenario.name}: running requests" in names
    assert len(names) == len(set(names))
