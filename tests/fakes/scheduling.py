"""Scheduler's surroundings without HTTP and wire: sinks that remember, requests, and a core joined to a PlainShard."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tests.fakes.scripted_shard import PlainShard, merge, pack
from tests.fakes.tokenizer import byte_tokenizer
from tgi.errors import TgiError
from tgi.router.backend import Finish, PromptToken, TokenEvent
from tgi.router.scheduling.core import SchedulerConfig, SchedulerCore
from tgi.router.scheduling.entry import AnswerText, Entry
from tgi.router.validation.request import ValidRequest, ValidStopping
from tgi.shard_client.messages import Command, Sampling, Step
from tgi.text.stream import TextStream

TOKENIZER = byte_tokenizer()


def open_text(request: ValidRequest) -> AnswerText:
    stopping = request.stopping
    return TextStream(
        TOKENIZER, request.prompt_ids, stopping.stop_strings, stopping.include_stop, stopping.min_new_tokens
    )


def make_request(
    prompt: Iterable[int] = range(10),
    max_new_tokens: int = 8,
    *,
    stop: tuple[str, ...] = (),
    include_stop: bool = True,
    stop_ids: tuple[int, ...] = (),
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
    sampling: Sampling | None = None,
    **fields: object,
) -> ValidRequest:
    stopping = ValidStopping(
        max_new_tokens=max_new_tokens,
        stop_strings=stop,
        include_stop=include_stop,
        stop_ids=stop_ids,
        min_new_tokens=min_new_tokens,
        ignore_eos=ignore_eos,
    )
    return ValidRequest(pack(prompt), sampling or Sampling(), stopping, **fields)  # pyright: ignore[reportArgumentType]


class MemorySink:
    """Keeps events, and holds the scheduler to the order that Sink promises."""

    def __init__(self) -> None:
        self.prompts: list[Sequence[PromptToken]] = []
        self.events: list[TokenEvent] = []
        self.error: TgiError | None = None
        self.finish: Finish | None = None
        self.num_ends = 0
        self.faults: list[str] = []  # the scheduler would take an exception for the sink's own

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        if self.events or self.prompts or self.num_ends:
            self.faults.append("the prompt comes first, and once")
        self.prompts.append(tokens)

    def token(self, event: TokenEvent) -> None:
        if self.num_ends:
            self.faults.append("a token after the end")
        self.events.append(event)
        if event.finish is not None:
            self.finish = event.finish
            self.num_ends += 1

    def fail(self, error: TgiError) -> None:
        if self.num_ends:
            self.faults.append("a failure after the end")
        self.error = error
        self.num_ends += 1

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.events]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if not event.special)


class ShardUnderTest(Protocol):
    """What the tests of this room need of a shard: PlainShard, or the engine over a device that checks its reads."""

    def open(self, owner: str = "") -> Step: ...
    def apply(self, command: Command) -> None: ...
    def advance(self) -> Step | None: ...


class Link:
    """A core and a shard joined by two queues, so that either may lag behind the other."""

    def __init__(self, core: SchedulerCore, shard: ShardUnderTest) -> None:
        self.core = core
        self.shard = shard
        self.steps: deque[Step] = deque()
        self.commands: deque[Command] = deque()

    def open(self) -> None:
        """A new stream; what was on the old one is lost."""
        self.steps.clear()
        self.commands.clear()
        self.core.stream_lost()
        self.core.handle_step(self.shard.open(str(id(self))))
        self.say()

    def say(self) -> None:
        """What the core has to say, on its way to the shard."""
        command = self.core.next_command()
        if command is not None:
            self.commands.append(command)

    def hear(self) -> bool:
        """The shard gets one Command. -> was there one?"""
        if self.commands:
            self.shard.apply(self.commands.popleft())
            return True
        return False

    def advance(self) -> bool:
        """The shard does one step. -> did it?"""
        step = self.shard.advance()
        if step is not None:
            self.steps.append(step)
        return step is not None

    def deliver(self, merged: int = 1) -> bool:
        """The core handles the next Step, or several merged into one. -> was there one?"""
        steps = [self.steps.popleft() for _ in range(min(merged, len(self.steps)))]
        if steps:
            self.core.handle_step(steps[0] if len(steps) == 1 else merge(steps))
            self.say()
        return bool(steps)

    def round(self) -> bool:
        """Everything once, in step."""
        self.say()
        heard = self.hear()
        advanced = self.advance()
        return self.deliver() or heard or advanced

    def run(self, rounds: int = 10_000) -> None:
        """Until nothing happens any more."""
        for _ in range(rounds):
            if not self.round():
                return
        raise AssertionError(f"still busy after {rounds} rounds")

    def until(self, condition: Callable[[], object], rounds: int = 2_000) -> None:
        for _ in range(rounds):
            if condition():
                return
            self.round()
        raise AssertionError(f"it did not happen in {rounds} rounds")

    def check(self) -> None:
        self.core.allocator.check(self.core.rows.allocations())


def joined(
    shard: PlainShard | None = None,
    *,
    next_handle: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    **config: object,
) -> Link:
    """A core over a PlainShard, with its stream open."""
    shard = shard or PlainShard()
    opening = shard.opening
    settings = SchedulerConfig(opening.num_blocks, opening.block_size, speculate=shard.speculated, **config)  # pyright: ignore[reportArgumentType]
    link = Link(SchedulerCore(settings, TOKENIZER, open_text, clock), shard)
    link.open()
    link.core.rows.next_handle = next_handle
    return link


def submit(link: Link, request: ValidRequest) -> tuple[Entry, MemorySink]:
    sink = MemorySink()
    return link.core.submit(request, sink), sink


def random_prompt(rng: random.Random, longest: int, vocab_size: int) -> list[int]:
    """Few beginnings, so that prefixes are shared; then anything."""
    family = rng.randrange(4)
    shared = [(family * 7 + i * i) % vocab_size for i in range(rng.randrange(longest))]
    return [*shared, *(rng.randrange(vocab_size) for _ in range(rng.randrange(1, max(2, longest // 3))))]
