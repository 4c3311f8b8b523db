"""Our policy: the router's own SchedulerCore and allocator over a simulated shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.simulator.machine import Machine, Work
from benchmarks.simulator.replay import Answer, Clock, Counts, Usage
from benchmarks.simulator.shard import Launch, SimulatedShard
from tgi.errors import TgiError
from tgi.router.backend import PromptToken, TokenEvent
from tgi.router.scheduling.core import SchedulerConfig, SchedulerCore
from tgi.router.validation.request import ValidRequest, ValidStopping
from tgi.shard_client.messages import Sampling, Step


class OnDemand:
    """See System."""

    def __init__(self, machine: Machine, clock: Clock, lengths_known: bool, prefix_caching: bool = True) -> None:
        self.counts = Counts()
        self._clock = clock
        self._lengths_known = lengths_known
        self._max_total_tokens = machine.max_total_tokens
        self._lag = machine.lag
        self._answers: list[Answer] = []
        self._ended: list[Answer] = []
        self._launched: deque[Launch] = deque()
        self.shard = SimulatedShard(machine, self.counts, self._answers.__getitem__)
        opening = self.shard.opening
        config = SchedulerConfig(opening.num_blocks, opening.block_size, prefix_caching)
        self.core = SchedulerCore(config, _NoVocabulary(), _no_text, clock)
        self._deliver(self.shard.open())

    def submit(self, answer: Answer) -> None:
        turn = answer.turn
        assert answer.index == len(self._answers)
        self._answers.append(answer)
        most = turn.num_answer if self._lengths_known else self._max_total_tokens - turn.num_prompt
        # The seed, which greedy rows do not use, tells the shard whose answer to give.
        talk = answer.conversation
        request = ValidRequest(
            turn.prompt,
            Sampling(seed=answer.index),
            ValidStopping(most),
            client=talk.client,
            priority=talk.priority,
        )
        self.core.submit(request, _Client(answer, self))
        self._say()

    def begin(self) -> Work | None:
        self._launch()
        if not self._launched and self.shard.rows:
            self._deliver(self.shard.skip())
            self._launch()
        if self._launched:
            return self._launched[0].work
        if self.shard.rows or self.core.queue:
            raise RuntimeError(f"{len(self.shard.rows)} rows and {len(self.core.queue)} requests wait for each other")
        return None

    def finish(self) -> Sequence[Answer]:
        self._ended = []
        self._deliver(self.shard.collect(self._launched.popleft()))
        self.counts.preemptions = self.core.stats.preemptions
        self.counts.prompt_tokens = self.core.stats.prompt_tokens
        self.counts.cached_tokens = self.core.stats.cached_tokens
        return self._ended

    def usage(self) -> Usage:
        allocator = self.core.allocator
        held = allocator.num_blocks - 1 - allocator.num_available
        return Usage(len(self.core.rows), held * allocator.block_size, self.shard.empty_tokens)

    def check(self) -> None:
        self.core.allocator.check(self.core.rows.allocations())

    def token(self, answer: Answer, event: TokenEvent) -> None:
        """A token reaches its client."""
        self.counts.add_token(answer, self._clock.now)
        if event.finish is not None:
            answer.admitted_s = event.finish.times.admitted
            self._ended.append(answer)

    def _launch(self) -> None:
        while len(self._launched) <= self._lag and (launch := self.shard.launch()) is not None:
            self._launched.append(launch)

    def _deliver(self, step: Step) -> None:
        self.core.handle_step(step)
        self._say()

    def _say(self) -> None:
        command = self.core.next_command()
        if command is not None:
            self.shard.apply(command)


class _Client:
    """The scheduler's Sink of one answer."""

    __slots__ = ("_answer", "_system")

    def __init__(self, answer: Answer, system: OnDemand) -> None:
        self._answer = answer
        self._system = system

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        pass

    def token(self, event: TokenEvent) -> None:
        self._system.token(self._answer, event)

    def fail(self, error: TgiError) -> None:
        raise error


class _Piece(NamedTuple):
    text: str = ""
    special: bool = False
    stop: str | None = None


class _NoText:
    """Tokens without text."""

    text = ""

    def push(self, token_id: int) -> _Piece:
        return _NOTHING

    def finish(self) -> str:
        return ""


class _NoVocabulary:
    eos_ids: tuple[int, ...] = ()

    def token_text(self, token_id: int) -> str:
        return ""

    def is_special(self, token_id: int) -> bool:
        return False


_NOTHING = _Piece()
_NO_TEXT = _NoText()


def _no_text(request: ValidRequest) -> _NoText:
    return _NO_TEXT
