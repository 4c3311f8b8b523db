"""The life of one request between its door and the backend: permit, validation, schedule, end.

Counts every request once and its outcome once. Knows no HTTP and not how batches are made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

from tgi.errors import GenerationFailed, InvalidRequest, Overloaded, TemplateFailed, TgiError, Unavailable
from tgi.observability.metrics import Metrics
from tgi.router.backend import Backend, Finish, PromptToken, Sink, Ticket, TokenEvent
from tgi.router.validation.request import ValidRequest
from tgi.router.validation.validator import Validator, Wish

logger = logging.getLogger(__name__)


class Infer:
    """Every generation route goes through here. Lives on the event loop."""

    def __init__(self, backend: Backend, validator: Validator, metrics: Metrics, max_concurrent_requests: int) -> None:
        self.backend = backend
        self.validator = validator
        self.metrics = metrics
        self.free_permits = max_concurrent_requests

    def accept(self) -> Call:
        """Count a request and give it a permit. Raises Overloaded when there is none."""
        self.metrics.count("tgi_request_count")
        if self.free_permits <= 0:
            self.metrics.count("tgi_request_failure", "overloaded")
            raise Overloaded
        self.free_permits -= 1
        return Call(self)


class Call:
    """One accepted request: holds its permit until the answer's end, and stands between backend and sink to see it.

    As a context manager it ends the request with any error raised inside; leaving it without one changes nothing.
    """

    __slots__ = ("_ended", "_infer", "_sink", "_ticket", "received_at")

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        self._sink: Sink | None = None
        self._ticket: Ticket | None = None
        self._ended = False
        self.received_at = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._end_with(error)
            if self._ticket is not None:
                self._ticket.cancel()

    async def validate(self, wish: Wish) -> ValidRequest:
        """Raises InvalidRequest."""
        request = await self._infer.validator.validate(wish)
        metrics = self._infer.metrics
        metrics.observe("tgi_request_input_length", request.num_prompt_tokens)
        metrics.observe("tgi_request_max_new_tokens", request.stopping.max_new_tokens)
        return request

    def schedule(self, request: ValidRequest, sink: Sink) -> None:
        """From here on `sink` gets events. Raises Overloaded, Unavailable or InvalidRequest before any."""
        self._sink = sink
        with self:
            self._ticket = self._infer.backend.schedule(request, self)

    def cancel(self) -> None:
        """Nobody waits for the answer any more. No event follows; may be called at any time and again."""
        if self._ended:
            return
        self._end("dropped")
        if self._ticket is not None:
            self._ticket.cancel()

    # The backend's side (Sink).

    def prompt(self, tokens: list[PromptToken]) -> None:
        assert self._sink is not None
        self._sink.prompt(tokens)

    def token(self, event: TokenEvent) -> None:
        if event.finish is not None and not self._ended:
            self._ended = True
            self._infer.free_permits += 1
            _report(self._infer.metrics, event.finish)
        try:
            self._sink.token(event)  # pyright: ignore[reportOptionalMemberAccess]  # set by schedule; once per token
        except Exception as error:
            if event.finish is None:
                raise
            # The scheduler has let go of the request: nobody else would tell the client that its answer is over.
            logger.exception("the end of an answer could not be handed on")
            self.fail(GenerationFailed(f"the answer broke at its end: {error}"))

    def fail(self, error: TgiError) -> None:
        self._end_with(error)
        assert self._sink is not None
        self._sink.fail(error)

    def _end_with(self, error: BaseException) -> None:
        if not self._ended and isinstance(error, GenerationFailed | Unavailable):
            logger.error("%s: %s", type(error).__name__, error)
        self._end(_cause(error))

    def _end(self, cause: str) -> None:
        if not self._ended:
            self._ended = True
            self._infer.free_permits += 1
            self._infer.metrics.count("tgi_request_failure", cause)


class Collector:
    """A sink that waits for the whole answer."""

    def __init__(self) -> None:
        self.prompt_tokens: list[PromptToken] = []
        self.events: list[TokenEvent] = []
        self.done: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def prompt(self, tokens: list[PromptToken]) -> None:
        self.prompt_tokens = tokens

    def token(self, event: TokenEvent) -> None:
        self.events.append(event)
        if event.finish is not None and not self.done.done():
            self.done.set_result(event.finish)

    def fail(self, error: TgiError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _cause(error: BaseException) -> str:
    """The `err` label of tgi_request_failure."""
    if isinstance(error, TemplateFailed):
        return "template"
    if isinstance(error, InvalidRequest):
        return "validation"
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, GenerationFailed | Unavailable):
        return "generation"
    return "dropped" if isinstance(error, asyncio.CancelledError) else "incomplete"


def _report(metrics: Metrics, finish: Finish) -> None:
    times = finish.times
    total = times.finished - times.received
    validation = times.queued - times.received
    queue = times.admitted - times.queued
    inference = times.finished - times.admitted
    per_token = inference / max(finish.num_generated, 1)
    metrics.count("tgi_request_success")
    metrics.observe("tgi_request_duration", total)
    metrics.observe("tgi_request_validation_duration", validation)
    metrics.observe("tgi_request_queue_duration", queue)
    metrics.observe("tgi_request_inference_duration", inference)
    metrics.observe("tgi_request_mean_time_per_token_duration", per_token)
    metrics.observe("tgi_request_generated_tokens", finish.num_generated)
    if logger.isEnabledFor(logging.INFO):
        durations = {
            "total_time": total,
            "validation_time": validation,
            "queue_time": queue,
            "inference_time": inference,
            "time_per_token": per_token,
        }
        fields = {name: f"{seconds * 1000:.3f}ms" for name, seconds in durations.items()}
        logger.info("Success", extra={"fields": fields | {"seed": finish.seed}})
