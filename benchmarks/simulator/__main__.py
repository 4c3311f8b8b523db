"""Scheduling policies on a virtual clock: ours beside TGI's, at equal memory, on the same machine and traces.

Ours is the router's own scheduler and allocator over a shard that plans like the engine; a step takes what a model of
the machine says. TGI's policy is reserve.py. Each figure is ours, with TGI's in the note. Requests leave `max_tokens`
unset unless the scenario says that lengths are known. Means (running requests, KV, output) are over the time while new
conversations begin; waiting times are over all requests. Deterministic: a seed per trace, and no clock of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import traces
from benchmarks.record import Figure, argument_parser, format_value, report
from benchmarks.simulator.machine import CPU, H200, Machine
from benchmarks.simulator.on_demand import OnDemand
from benchmarks.simulator.replay import Clock, Outcome, replay
from benchmarks.simulator.reserve import ReserveUpFront
from benchmarks.traces import Trace

MORE_RUNNING = ">= 2"
LESS_PREFILL = "<= 1"


@dataclass(frozen=True, slots=True)
class Scenario:
    """`trace(requests)` makes the load; targets are relations to TGI's policy."""

    name: str
    machine: Machine
    trace: Callable[[int], Trace]
    requests: int
    running_target: str = ""
    prefill_target: str = ""


def _h200(name: str, trace: Callable[[int], Trace], requests: int, *targets: str) -> Scenario:
    return Scenario(f"H200, {name}", H200, trace, requests, *targets)


def _cpu(name: str, trace: Callable[[int], Trace], requests: int, *targets: str) -> Scenario:
    return Scenario(f"CPU, {name}", CPU, trace, requests, *targets)


# Loads are above what either policy can serve, so that memory decides; but for the light one, where nobody waits.
LIMIT, CPU_LIMIT = H200.max_total_tokens, CPU.max_total_tokens
SCENARIOS = [
    _h200("poisson", lambda n: traces.poisson(1, requests=n, rate=90, limit=LIMIT), 1_800, MORE_RUNNING),
    _h200("bursts", lambda n: traces.bursts(2, requests=n, size=300, every_s=5, limit=LIMIT), 1_800, MORE_RUNNING),
    _h200("chat", lambda n: traces.chats(3, requests=n, rate=35, limit=LIMIT), 2_400, MORE_RUNNING),
    _h200("chat, lengths known", lambda n: traces.known(traces.chats(3, requests=n, rate=35, limit=LIMIT)), 2_400),
    _h200("chat, light load", lambda n: traces.chats(4, requests=n, rate=6, limit=LIMIT), 600),
    _h200("long documents", lambda n: traces.documents(5, requests=n, rate=25, limit=LIMIT), 750),
    _h200(
        "shared system prompt",
        lambda n: traces.shared_prompts(6, requests=n, rate=40, apps=16, limit=LIMIT),
        1_200,
        "",
        LESS_PREFILL,
    ),
    _cpu("chat", lambda n: traces.chats(7, requests=n, rate=2, limit=CPU_LIMIT), 400, MORE_RUNNING),
    _cpu("chat, lengths known", lambda n: traces.known(traces.chats(7, requests=n, rate=2, limit=CPU_LIMIT)), 400),
    _cpu(
        "shared system prompt",
        lambda n: traces.shared_prompts(8, requests=n, rate=0.7, apps=6, limit=CPU_LIMIT),
        200,
        "",
        LESS_PREFILL,
    ),
]


def compare(scenario: Scenario, requests: int) -> tuple[Outcome, Outcome]:
    """(ours, TGI's policy) on the same trace."""
    trace, machine = scenario.trace(requests), scenario.machine
    outcomes: list[Outcome] = []
    for policy in (OnDemand, ReserveUpFront):
        clock = Clock()
        outcomes.append(replay(trace, machine, policy(machine, clock, trace.lengths_known), clock))
    ours, baseline = outcomes
    return ours, baseline


def figures(scenario: Scenario, ours: Outcome, baseline: Outcome) -> Iterator[Figure]:
    def figure(what: str, unit: str, value: Callable[[Outcome], float], more: str = "") -> Figure:
        note = f"TGI's policy: {format_value(value(baseline))}{more}"
        return Figure(f"{scenario.name}: {what}", value(ours), unit, "", note)

    def against(what: str, value: Callable[[Outcome], float], target: str) -> Figure:
        note = both(value)
        return Figure(f"{scenario.name}: {what}", value(ours) / value(baseline), "× TGI's policy", target, note)

    def both(value: Callable[[Outcome], float]) -> str:
        return f"{format_value(value(ours))} against {format_value(value(baseline))}"

    def late(what: str, value: Callable[[Outcome, float], float]) -> Figure:
        medians = f"; p50: {both(lambda outcome: value(outcome, 50))}"
        return figure(f"{what}, p99", "s", lambda outcome: value(outcome, 99), medians)

    yield against("running requests", lambda outcome: outcome.running, scenario.running_target)
    yield against("prefill tokens computed", lambda outcome: outcome.counts.prefill_tokens, scenario.prefill_target)
    yield figure("output", "tokens/s", lambda outcome: outcome.tokens_per_s)
    yield figure("KV held by running requests", "%", lambda outcome: outcome.held * 100)
    yield figure("KV held and empty", "%", lambda outcome: outcome.empty * 100)
    yield figure("given to requests and never written", "%", lambda outcome: outcome.unused * 100)
    yield figure("prompt tokens found in the prefix cache", "%", lambda outcome: outcome.hit_rate * 100)
    yield figure("preemptions", "", lambda outcome: outcome.counts.preemptions)
    yield figure("computed twice", "tokens", lambda outcome: outcome.counts.recomputed_tokens)
    yield late("wait for admission", Outcome.wait_s)
    yield late("first token", Outcome.first_token_s)
    longest = f"; longest: {both(lambda outcome: outcome.gap_s(100) * 1e3)}"
    yield figure("between tokens, p99", "ms", lambda outcome: outcome.gap_s(99) * 1e3, longest)


def main() -> None:
    parser = argument_parser(__doc__, "simulator")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name has TEXT (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests (default: 1)")
    arguments = parser.parse_args()
    measured = [
        figure
        for scenario in SCENARIOS
        if arguments.only in scenario.name
        for figure in figures(scenario, *compare(scenario, max(2, round(scenario.requests * arguments.scale))))
    ]
    report(arguments, "simulator", "Scheduling policies, simulated: ours and TGI's at equal memory", measured)


if __name__ == "__main__":
    main()
