"""Replays a trace against a serving system on a virtual clock, and measures what the system did.

A system is a policy and the shard it commands, joined. This file knows neither: it gives requests at their moments,
lets the clock run while the system's steps do, and counts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.simulator.machine import Machine, Work
from benchmarks.traces import Conversation, Trace, Turn

CHECK_EVERY = 997  # steps


class Clock:
    """Seconds since the trace began. Called like time.perf_counter."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Answer:
    """One request on its way, as its client sees it."""

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "computed",
        "conversation",
        "first_token_s",
        "index",
        "last_token_s",
        "num_ends",
        "num_tokens",
        "turn",
        "turn_index",
    )

    def __init__(self, index: int, conversation: Conversation, turn_index: int, arrived_s: float) -> None:
        self.index = index  # order of arrival
        self.conversation = conversation
        self.turn_index = turn_index
        self.turn: Turn = conversation.turns[turn_index]
        self.arrived_s = arrived_s
        self.admitted_s = math.nan  # the first time
        self.first_token_s = math.nan
        self.last_token_s = math.nan
        self.num_tokens = 0
        self.num_ends = 0
        self.computed = 0  # positions that were computed or found for it so far: to compute one again is waste


@dataclass(slots=True)
class Usage:
    """A system at one moment."""

    running: int  # requests that have their memory
    held_tokens: int  # KV that running requests keep from others, shared prefixes once
    empty_tokens: int  # of these, holding nothing yet


@dataclass(slots=True)
class Counts:
    """What a system counts itself."""

    prompt_tokens: int = 0  # of requests when they first start
    cached_tokens: int = 0  # of these, found in the prefix cache
    prefill_tokens: int = 0  # computed, prompts and what had to be read again
    recomputed_tokens: int = 0  # of these, computed before for the same request
    preemptions: int = 0
    reserved_tokens: int = 0  # given to rows by the time they ended, beyond what was cached
    unused_tokens: int = 0  # of these, never written
    generated_tokens: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between two tokens of a stream

    def add_computed(self, answer: Answer, begin: int, end: int, prefill: int) -> None:
        """Positions begin..end of the answer are computed, `prefill` of them not as they were generated."""
        self.prefill_tokens += prefill
        if begin < answer.computed:
            self.recomputed_tokens += min(end, answer.computed) - begin
        answer.computed = max(answer.computed, end)

    def add_token(self, answer: Answer, now: float) -> None:
        """The client gets a token."""
        if answer.num_tokens:
            self.gaps_s.append(now - answer.last_token_s)
        else:
            answer.first_token_s = now
        answer.last_token_s = now
        answer.num_tokens += 1
        self.generated_tokens += 1


class System(Protocol):
    counts: Counts

    def submit(self, answer: Answer) -> None: ...

    def begin(self) -> Work | None:
        """The next step; None when nobody is there. Raises RuntimeError when somebody is and nothing can run."""
        ...

    def finish(self) -> Sequence[Answer]:
        """The step that began is done. -> who has ended with it."""
        ...

    def usage(self) -> Usage: ...

    def check(self) -> None:
        """AssertionError unless every block is where it should be."""
        ...


@dataclass(slots=True)
class Outcome:
    """What became of a trace. Means are over the time while the load is on, the same for every system."""

    answers: list[Answer]
    counts: Counts
    took_s: float  # to the last end
    steps: int
    tokens_per_s: float  # mean
    running: float  # mean
    held: float  # mean, part of the pool
    empty: float  # mean, part of the pool

    @property
    def hit_rate(self) -> float:
        return self.counts.cached_tokens / self.counts.prompt_tokens

    @property
    def unused(self) -> float:
        """Part of what rows were given that they never wrote."""
        return self.counts.unused_tokens / self.counts.reserved_tokens

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Clients and priorities among the requests."""
        return sorted({(answer.conversation.client, answer.conversation.priority) for answer in self.answers})

    def wait_s(self, percent: float, group: tuple[str, int] | None = None) -> float:
        """From arrival to the first admission, of all or of one client and priority."""
        waits = [
            answer.admitted_s - answer.arrived_s
            for answer in self.answers
            if group in (None, (answer.conversation.client, answer.conversation.priority))
        ]
        return percentile(waits, percent)

    def first_token_s(self, percent: float) -> float:
        return percentile([answer.first_token_s - answer.arrived_s for answer in self.answers], percent)

    def gap_s(self, percent: float) -> float:
        return percentile(self.counts.gaps_s, percent)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def replay(trace: Trace, machine: Machine, system: System, clock: Clock, check_every: int = CHECK_EVERY) -> Outcome:
    """The whole trace, to the last answer's end. Raises AssertionError when an answer is not what the trace says."""
    order = itertools.count()
    due = [(talk.begins_s, next(order), talk, 0) for talk in trace.conversations]
    heapq.heapify(due)
    answers: list[Answer] = []
    steps = generated = 0
    area = [0.0, 0.0, 0.0]  # running, held, empty; times seconds
    window_s = trace.window_s or math.inf  # where all come at once it is the whole time

    def let_time_pass(until: float) -> None:
        """Requests that come meanwhile are submitted at their moments."""
        while due and due[0][0] <= until:
            clock.now, _, conversation, turn_index = heapq.heappop(due)
            answers.append(Answer(len(answers), conversation, turn_index, clock.now))
            system.submit(answers[-1])
        clock.now = until

    while True:
        work = system.begin()
        if work is None:
            if not due:
                break
            let_time_pass(due[0][0])
            continue
        usage = system.usage()
        ends_s = clock.now + machine.seconds(work)
        seconds = max(0.0, min(ends_s, window_s) - clock.now)
        for index, value in enumerate((usage.running, usage.held_tokens, usage.empty_tokens)):
            area[index] += value * seconds
        let_time_pass(ends_s)
        for answer in system.finish():
            answer.num_ends += 1
            following = answer.turn_index + 1
            if following < len(answer.conversation.turns):
                at = clock.now + answer.conversation.turns[following].pause_s
                heapq.heappush(due, (at, next(order), answer.conversation, following))
        if clock.now <= window_s:
            generated = system.counts.generated_tokens
        steps += 1
        if not steps % check_every:
            system.check()
    system.check()
    for answer in answers:
        assert answer.num_ends == 1, f"request {answer.index} ended {answer.num_ends} times"
        assert answer.num_tokens == answer.turn.num_answer, f"request {answer.index} has another answer"
    assert len(answers) == sum(len(talk.turns) for talk in trace.conversations), "a turn was never asked"
    window_s = min(window_s, clock.now)
    running, held, empty = (value / window_s for value in area)
    pool = machine.pool_tokens
    return Outcome(answers, system.counts, clock.now, steps, generated / window_s, running, held / pool, empty / pool)
