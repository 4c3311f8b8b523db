"""TGI's own generation routes: POST /, /generate, /generate_stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tgi.errors import TgiError
from tgi.router.api.answer import collect, mean_logprob, rendered
from tgi.router.api.body import BodyReader
from tgi.router.api.errors import native_body, native_response
from tgi.router.api.headers import answer_headers, client_of, priority_of, stream_headers, traceparent_of
from tgi.router.api.services import services_of
from tgi.router.api.sse import EventStream
from tgi.router.backend import Finish, PromptToken, TokenEvent, TopToken
from tgi.router.infer import Collector
from tgi.router.schema.generate import (
    BestOfSequence,
    CompatRequest,
    Details,
    GenerateRequest,
    GenerateResponse,
    PrefillToken,
    StreamDetails,
    StreamEvent,
    Token,
)
from tgi.router.schema.numbers import shortest_f32
from tgi.router.validation.door import NATIVE
from tgi.router.validation.request import fork
from tgi.router.validation.validator import Wish

_compat_body = BodyReader(CompatRequest)
_generate_body = BodyReader(GenerateRequest)
_encode = msgspec.json.Encoder().encode


async def compat(request: Request) -> Response | EventStream:
    """POST /: `stream` chooses; the plain answer is a list of one."""
    services = services_of(request)
    body = await _compat_body.read(request, services.payload_limit)
    if body.stream:
        return await _stream(request, body, services.compat_return_full_text)
    return await _plain(request, body, services.compat_return_full_text, as_list=True)


async def generate(request: Request) -> Response:
    body = await _generate_body.read(request, services_of(request).payload_limit)
    return await _plain(request, body)


async def generate_stream(request: Request) -> EventStream:
    body = await _generate_body.read(request, services_of(request).payload_limit)
    return await _stream(request, body)


async def _plain(
    request: Request, body: GenerateRequest, return_full_text: bool = False, as_list: bool = False
) -> Response:
    services = services_of(request)
    # More than the server allows are refused by the validation, in TGI's words, instead of for want of permits.
    num_answers = min(body.wanted.best_of or 1, max(services.info.max_best_of, 1))
    with services.infer.accept(num_answers) as call:
        valid = await call.validate(_wish(request, body, call.received_at, is_streaming=False))
        collectors = await collect(request, call, fork(valid, num_answers))
    best = max(range(num_answers), key=lambda index: mean_logprob(collectors[index]))  # of equal ones the first

    def make() -> bytes:
        answer = _response(body, return_full_text, collectors, best)
        return _encode([answer] if as_list else answer)

    data = await rendered(make, collectors)
    finish = _finish(collectors, best)
    headers = answer_headers(services.compute_type, len(body.inputs), finish)
    return Response(data, 200, headers, "application/json")


async def _stream(request: Request, body: GenerateRequest, return_full_text: bool = False) -> EventStream:
    services = services_of(request)
    with services.infer.accept() as call:
        valid = await call.validate(_wish(request, body, call.received_at, is_streaming=True))
        return EventStream(
            call,
            [(valid, NativeFrames(body, return_full_text))],
            services.pulse,
            stream_headers(services.compute_type, len(body.inputs)),
            native_response,
        )


def _wish(request: Request, body: GenerateRequest, received_at: float, is_streaming: bool) -> Wish:
    """Raises InvalidRequest for a header that is wrong."""
    wanted = body.wanted
    priority = priority_of(request, wanted.priority)
    if priority != wanted.priority:
        wanted = msgspec.structs.replace(wanted, priority=priority)
    return Wish(
        body.inputs,
        wanted,
        NATIVE,
        is_streaming,
        received_at,
        traceparent_of(request),
        client=client_of(request),
    )


class NativeFrames:
    """Events of /generate_stream. Ends without a marker."""

    def __init__(self, body: GenerateRequest, return_full_text: bool) -> None:
        self._body = body
        self._return_full_text = return_full_text
        self._index = 0

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        """TGI streams no prompt details."""

    def close(self) -> bytes:
        return b""

    def token(self, event: TokenEvent) -> bytes:
        self._index += 1
        if event.finish is not None or event.top_tokens:
            return b"data: %b\n\n" % _encode(self._whole(event))
        logprob = shortest_f32(event.logprob)
        # The structs' encoding of a plain token, in one step: once per token.
        return (
            b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},'
            b'"generated_text":null,"details":null}\n\n'
        ) % (
            self._index,
            event.token_id,
            _encode(event.text),
            b"null" if logprob is None else repr(logprob).encode(),
            b"true" if event.special else b"false",
        )

    def failure(self, error: TgiError) -> bytes:
        return b"data: %b\n\n" % native_body(error)

    def _whole(self, event: TokenEvent) -> StreamEvent:
        finish = event.finish
        details = None
        if finish is not None and self._body.wanted.details:
            details = StreamDetails(
                finish_reason=finish.reason.value,
                generated_tokens=finish.num_generated,
                seed=finish.seed,
                input_length=finish.num_prompt,
                stop_reason=_stop_reason(finish),
            )
        return StreamEvent(
            index=self._index,
            token=_token(event),
            top_tokens=[_token_of_top(top) for top in event.top_tokens] or UNSET,
            generated_text=None if finish is None else _full_text(self._body, self._return_full_text, finish),
            details=details,
        )


def _full_text(body: GenerateRequest, default: bool, finish: Finish) -> str:
    asked = body.wanted.return_full_text
    return body.inputs + finish.text if (default if asked is None else asked) else finish.text


def _response(
    body: GenerateRequest, return_full_text: bool, collectors: Sequence[Collector], best: int
) -> GenerateResponse:
    texts = [_full_text(body, return_full_text, collector.finish) for collector in collectors]
    if not (body.wanted.details or body.wanted.decoder_input_details):
        return GenerateResponse(texts[best])
    # Only the first of several has the prompt's logprobs computed: they all have the same.
    prefill = _prefill(collectors[0].prompt_tokens)
    others = [
        BestOfSequence(generated_text=text, prefill=prefill, **_answer(collector))
        for index, (text, collector) in enumerate(zip(texts, collectors))
        if index != best
    ]
    details = Details(prefill=prefill, best_of_sequences=others or UNSET, **_answer(collectors[best]))
    return GenerateResponse(texts[best], details)


def _finish(collectors: Sequence[Collector], best: int) -> Finish:
    """The best answer's end, at the time when all were there."""
    finish = collectors[best].finish
    finished = max(collector.finish.times.finished for collector in collectors)
    return replace(finish, times=replace(finish.times, finished=finished))


class _Answer(TypedDict):
    """What the details tell of the best answer and of the others alike."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType
    stop_reason: str | int | UnsetType


def _answer(collector: Collector) -> _Answer:
    finish = collector.finish
    top_tokens = [[_token_of_top(top) for top in event.top_tokens] for event in collector.events]
    return _Answer(
        finish_reason=finish.reason.value,
        generated_tokens=finish.num_generated,
        seed=finish.seed,
        tokens=[_token(event) for event in collector.events],
        top_tokens=top_tokens if any(top_tokens) else UNSET,
        stop_reason=_stop_reason(finish),
    )


def _prefill(tokens: Sequence[PromptToken]) -> list[PrefillToken]:
    return [
        PrefillToken(token.id, token.text, None if token.logprob is None else shortest_f32(token.logprob))
        for token in tokens
    ]


def _token(event: TokenEvent) -> Token:
    return Token(event.token_id, event.text, shortest_f32(event.logprob), event.special)


def _token_of_top(top: TopToken) -> Token:
    return Token(top.id, top.text, shortest_f32(top.logprob), top.special)


def _stop_reason(finish: Finish) -> str | int | UnsetType:
    return UNSET if finish.stop is None else finish.stop
