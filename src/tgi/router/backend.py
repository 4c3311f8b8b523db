"""The seam between the doors (HTTP) and the scheduler: what a request may ask for, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tgi.enums import FinishReason
from tgi.errors import TgiError
from tgi.router.validation.request import ValidRequest


@dataclass(frozen=True, slots=True)
class TopToken:
    id: int
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True)
class Times:
    """Moments of one request, time.perf_counter() seconds."""

    received: float
    queued: float
    admitted: float  # first time
    first_token: float
    finished: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Closes an answer; travels on its last token's event."""

    reason: FinishReason
    text: str  # whole visible text: equal to the joined texts of the events whose token is not special
    num_generated: int  # tokens, the EOS or stop token included
    num_prompt: int
    num_cached: int  # prompt tokens found in the prefix tree at first admission
    seed: int | None  # None when greedy
    stop: str | int | None  # the stop string or stop id that matched
    times: Times


@dataclass(slots=True)
class TokenEvent:
    """One generated token."""

    token_id: int
    text: str  # what became visible with it; a special token's own text
    logprob: float
    special: bool
    top_tokens: tuple[TopToken, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class PromptToken:
    id: int
    text: str
    logprob: float | None
    top_tokens: tuple[TopToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Flushed:
    """What emptying the prefix cache did, in blocks."""

    flushed: int  # free now
    live: int  # stay: running requests use them


class Sink(Protocol):
    """Where a request's events go, in the order: prompt?, token*, and exactly one of (last token with finish, fail).

    Called from the event loop, never concurrently, and never again after the end. Must return at once and must not
    raise.
    """

    def prompt(self, tokens: Sequence[PromptToken]) -> None: ...
    def token(self, event: TokenEvent) -> None: ...
    def fail(self, error: TgiError) -> None: ...


class Ticket(Protocol):
    """A scheduled request. `cancel()` may be called at any time, any number of times; no event follows it."""

    def cancel(self) -> None: ...


class Backend(Protocol):
    def schedule(self, request: ValidRequest, sink: Sink) -> Ticket:
        """Queue a request. Raises Overloaded, Unavailable or InvalidRequest (it could never fit) before any event."""
        ...

    async def is_healthy(self) -> bool:
        """Is the shard alive and moving? Never runs a generation."""
        ...

    def flush_cache(self) -> Flushed:
        """Forget every cached prefix that no running request uses. No request notices, but that it computes more."""
        ...
