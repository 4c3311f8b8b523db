"""The life of one request between its door and the backend: permit, validation, schedule, end.

Counts every request once and its outcome once. Knows no HTTP and not how batches are made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from tgi.errors import GenerationFailed, InvalidRequest, Overloaded, TemplateFailed, TgiError, Unavailable
from tgi.observability.metrics import Metrics
from tgi.observability.tracing import current_span
from tgi.router.backend import Backend, Finish, PromptToken, Sink, Ticket, Times, TokenEvent
from tgi.router.schema.generate import GenerateParameters
from tgi.router.validation.request import ValidRequest
from tgi.router.validation.validator import Validator, Wish

if TYPE_CHECKING:
    from tgi.observability.otlp import Span

logger = logging.getLogger(__name__)

MAX_PARAMETERS = 4096
"""Characters of a request's parameters in its span: a grammar may be of any length."""


class Infer:
    """Every generation route goes through here. Lives on the event loop."""

    def __init__(self, backend: Backend, validator: Validator, metrics: Metrics, max_concurrent_requests: int) -> None:
        self.backend = backend
        self.validator = validator
        self.metrics = metrics
        self.max_answers = max_concurrent_requests
        self.free_permits = max_concurrent_requests

    def accept(self, num_answers: int = 1, param: str | None = None) -> Call:
        """Count a request and give each of its answers (`n`, `best_of`, several prompts) a permit.

        `param`: the field that asks for several. Raises Overloaded when there are too few now, InvalidRequest when
        there can never be enough.
        """
        self.metrics.count("tgi_request_count")
        if num_answers > self.max_answers:
            self.metrics.count("tgi_request_failure", "validation")
            field = f"`{param}`: " if param else ""
            raise InvalidRequest(
                f"{field}one request may ask for at most {self.max_answers} answers (see --max-concurrent-requests). "
                f"Given: {num_answers}",
                param,
            )
        if num_answers > self.free_permits:
            self.metrics.count("tgi_request_failure", "overloaded")
            raise Overloaded
        self.free_permits -= num_answers
        return Call(self, num_answers)


class Call:
    """One accepted request: holds its permits until each answer's end, and stands between backend and sinks to see it.

    Its answers succeed or fail together: the first error, or a cancel, ends them all. As a context manager it ends the
    request with any error raised inside; leaving it without one changes nothing.
    """

    __slots__ = ("_answers", "_ended", "_infer", "_num_open", "_span", "_spent", "received_at")

    def __init__(self, infer: Infer, num_answers: int) -> None:
        self._infer = infer
        self._answers: list[_Answer] = []
        self._num_open = num_answers  # answers that have not ended: permits that are held
        self._ended = False
        self._spent: list[tuple[Times, int]] = []  # by the answers that are complete, and their tokens
        self._span = current_span()
        self.received_at = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._end_with(error)
            self._cancel_answers()

    async def validate(self, wish: Wish) -> ValidRequest:
        """Raises InvalidRequest."""
        if self._span is not None:
            self._span.tell({"parameters": _shown(wish.parameters)})
        request = await self._infer.validator.validate(wish)
        metrics = self._infer.metrics
        metrics.observe("tgi_request_input_length", request.num_prompt_tokens)
        metrics.observe("tgi_request_max_new_tokens", request.stopping.max_new_tokens)
        return request

    def schedule(self, request: ValidRequest, sink: Sink) -> None:
        """Start the next answer: from here on `sink` gets events. Raises Overloaded, Unavailable or InvalidRequest
        before any. To be called once per answer that was accepted, all in one turn of the event loop."""
        if self._span is not None and not self._answers:
            self._span.child("validate", self.received_at, time.perf_counter())
        answer = _Answer(self, sink)
        self._answers.append(answer)
        with self:
            answer.ticket = self._infer.backend.schedule(request, answer)

    def cancel(self) -> None:
        """Nobody waits for the answers any more. No event follows; may be called at any time and again."""
        if self._ended:
            return
        self._end("dropped", "the client has gone")
        self._cancel_answers()

    def answered(self, finish: Finish) -> None:
        """One answer is complete."""
        if self._ended:
            return
        self._num_open -= 1
        self._infer.free_permits += 1
        self._spent.append((finish.times, finish.num_generated))
        if self._span is not None:
            _trace(self._span, finish.times)
        if not self._num_open:
            self._ended = True
            self._infer.metrics.count("tgi_request_success")
            _report(self._infer.metrics, self._span, self._spent, finish.seed)

    def failed(self, error: TgiError) -> None:
        """One answer has failed, and the others with it."""
        self._end_with(error)
        self._cancel_answers()

    def _cancel_answers(self) -> None:
        for answer in self._answers:
            if answer.ticket is not None:
                answer.ticket.cancel()

    def _end_with(self, error: BaseException) -> None:
        if not self._ended and isinstance(error, GenerationFailed | Unavailable):
            logger.error("%s: %s", type(error).__name__, error)
        self._end(_cause(error), str(error) or type(error).__name__)

    def _end(self, cause: str, message: str) -> None:
        if not self._ended:
            self._ended = True
            self._infer.free_permits += self._num_open
            self._infer.metrics.count("tgi_request_failure", cause)
            if self._span is not None:
                self._span.tell({"error.type": cause})
                self._span.fail(message)


class _Answer:
    """The Sink that the backend sees: tells the call of its answer's end, and the door of everything."""

    __slots__ = ("_call", "_sink", "ticket")

    def __init__(self, call: Call, sink: Sink) -> None:
        self._call = call
        self._sink = sink
        self.ticket: Ticket | None = None

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        self._sink.prompt(tokens)

    def token(self, event: TokenEvent) -> None:
        if event.finish is not None:
            self._call.answered(event.finish)
        try:
            self._sink.token(event)
        except Exception as error:
            if event.finish is None:
                raise
            # The scheduler has let go of the request: nobody else would tell the client that its answer is over.
            logger.exception("the end of an answer could not be handed on")
            self.fail(GenerationFailed(f"the answer broke at its end: {error}"))

    def fail(self, error: TgiError) -> None:
        self._call.failed(error)
        self._sink.fail(error)


class Collector:
    """A sink that keeps a whole answer."""

    def __init__(self) -> None:
        self.prompt_tokens: Sequence[PromptToken] = []
        self.events: list[TokenEvent] = []
        self.done: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    @property
    def finish(self) -> Finish:
        """Of a complete answer."""
        return self.done.result()

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
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


def _report(metrics: Metrics, span: Span | None, spent: Sequence[tuple[Times, int]], seed: int | None) -> None:
    """Times of a request whose answers are all complete, and what each of them has of its own."""
    times = _together([times for times, _ in spent])
    total = times.finished - times.received
    validation = times.queued - times.received
    queue = times.admitted - times.queued
    inference = times.finished - times.admitted
    per_token = [(own.finished - own.admitted) / max(count, 1) for own, count in spent]
    metrics.observe("tgi_request_duration", total)
    metrics.observe("tgi_request_validation_duration", validation)
    metrics.observe("tgi_request_queue_duration", queue)
    metrics.observe("tgi_request_inference_duration", inference)
    metrics.observe("tgi_request_first_token_duration", times.first_token - times.received)
    for seconds, (_, count) in zip(per_token, spent):
        metrics.observe("tgi_request_mean_time_per_token_duration", seconds)
        metrics.observe("tgi_request_generated_tokens", count)
    if span is not None or logger.isEnabledFor(logging.INFO):
        durations = {
            "total_time": total,
            "validation_time": validation,
            "queue_time": queue,
            "inference_time": inference,
            "time_per_token": sum(per_token) / len(per_token),
        }
        fields = {name: f"{seconds * 1000:.3f}ms" for name, seconds in durations.items()}
        logger.info("Success", extra={"fields": fields | {"seed": seed}})
        if span is not None:  # in TGI's form: a u64 would not fit an attribute's integer
            span.tell(fields | {"seed": "None" if seed is None else f"Some({seed})"})


def _trace(span: Span, times: Times) -> None:
    """Where the time of one answer went."""
    span.child("queued", times.queued, times.admitted)
    infer = span.child("infer", times.admitted, times.finished)
    infer.child("prefill", times.admitted, times.first_token)
    infer.child("decode", times.first_token, times.finished)


def _shown(parameters: GenerateParameters) -> str:
    """What was asked for, as JSON; what was not asked for is left out."""
    given = {name: value for name, value in msgspec.structs.asdict(parameters).items() if value is not None}
    return msgspec.json.encode(given).decode()[:MAX_PARAMETERS]


def _together(times: Sequence[Times]) -> Times:
    """Of several answers as one: whatever is first of its kind, and the last end."""
    if len(times) == 1:
        return times[0]
    return Times(
        received=min(own.received for own in times),
        queued=min(own.queued for own in times),
        admitted=min(own.admitted for own in times),
        first_token=min(own.first_token for own in times),
        finished=max(own.finished for own in times),
    )
