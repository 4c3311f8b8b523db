"""Scheduling policies on a virtual clock: ours beside TGI's, at equal memory, on the same machine and traces.

Ours is the router's own scheduler and allocator over a shard that plans like the engine; a step takes what a model of
the machine says. TGI's policy is reserve.py. Each figure is ours, with TGI's in the note. Requests leave `max_tokens`
unset unless the scenario says that lengths are known. Means (running requests, KV, output) are over the time while new
conversations begin; waiting times are over all requests. Deterministic: a seed per trace, and no clock of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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
    """A load on a machine. Targets are relations to TGI's policy."""

    machine: Machine
    load: str
    generate: Callable[..., Trace]  # of `requests` and `limit`
    requests: int
    lengths_known: bool = False
    running_target: str = ""
    prefill_target: str = ""

    @property
    def name(self) -> str:
        return f"{self.machine.name}, {self.load}{', lengths known' if self.lengths_known else ''}"

    def trace(self, scale: float = 1.0) -> Trace:
        requests = max(2, round(self.requests * scale))
        trace = self.generate(requests=requests, limit=self.machine.max_total_tokens)
        return traces.known(trace) if self.lengths_known else trace


# Loads are above what either policy can serve, so that memory decides; but for the light one, where nobody waits.
CHAT = partial(traces.chats, 3, rate=35)
CPU_CHAT = partial(traces.chats, 7, rate=2)
SHARED = partial(traces.shared_prompts, 6, rate=40, apps=16)
CPU_SHARED = partial(traces.shared_prompts, 8, rate=0.7, apps=6)
SCENARIOS = [
    Scenario(H200, "poisson", partial(traces.poisson, 1, rate=90), 1_800, running_target=MORE_RUNNING),
    Scenario(H200, "bursts", partial(traces.bursts, 2, size=300, every_s=5), 1_800, running_target=MORE_RUNNING),
    Scenario(H200, "chat", CHAT, 2_400, running_target=MORE_RUNNING),
    Scenario(H200, "chat", CHAT, 2_400, lengths_known=True),
    Scenario(H200, "chat, light load", partial(traces.chats, 4, rate=6), 600),
    Scenario(H200, "long documents", partial(traces.documents, 5, rate=25), 750),
    Scenario(H200, "shared system prompt", SHARED, 1_200, prefill_target=LESS_PREFILL),
    Scenario(H200, "a flood beside a quiet client", partial(traces.flooded, 9, rate=60), 1_200),
    Scenario(H200, "two priorities", partial(traces.ranked, 10, rate=90), 1_800),
    Scenario(CPU, "chat", CPU_CHAT, 400, running_target=MORE_RUNNING),
    Scenario(CPU, "chat", CPU_CHAT, 400, lengths_known=True),
    Scenario(CPU, "shared system prompt", CPU_SHARED, 200, prefill_target=LESS_PREFILL),
]


def compare(trace: Trace, machine: Machine) -> tuple[Outcome, Outcome]:
    """(ours, TGI's policy) on the same trace."""
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
    if len(ours.groups) > 1:
        for client, priority in ours.groups:
            who = f"client {client}" if client else f"priority {priority}"
            yield late(f"wait for admission, {who}", partial(Outcome.wait_s, group=(client, priority)))
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
        for figure in figures(scenario, *compare(scenario.trace(arguments.scale), scenario.machine))
    ]
    report(arguments, "simulator", "Scheduling policies, simulated: ours and TGI's at equal memory", measured)


if __name__ == "__main__":
    main()
