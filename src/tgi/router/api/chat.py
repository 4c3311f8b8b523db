"""POST /v1/chat/completions, plain and streamed."""

from __future__ import annotations

import secrets
import time

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tgi.enums import FinishReason
from tgi.errors import InvalidRequest, TgiError
from tgi.router.api.answer import collect
from tgi.router.api.body import BodyReader
from tgi.router.api.errors import openai_body, openai_response
from tgi.router.api.headers import answer_headers, stream_headers, traceparent_of
from tgi.router.api.services import Services, services_of
from tgi.router.api.sse import EventStream
from tgi.router.backend import Finish, PromptToken, TokenEvent
from tgi.router.chat.messages import template_messages
from tgi.router.schema.chat import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    Choice,
    ChunkChoice,
    Delta,
    Logprobs,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tgi.router.schema.generate import GenerateParameters
from tgi.router.schema.numbers import shortest_f32
from tgi.router.validation.door import CHAT
from tgi.router.validation.parameters import not_supported
from tgi.router.validation.validator import Wish

_body = BodyReader(ChatRequest)
_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"

_FINISH_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS_TOKEN: "stop", FinishReason.STOP_SEQUENCE: "stop"}


async def chat_completions(request: Request) -> Response | EventStream:
    services = services_of(request)
    body = await _body.read(request, services.payload_limit)
    with services.infer.accept() as call:
        refuse_unsupported(body)
        prompt = await services.template.render_aside(template_messages(body.messages), body.chat_template_kwargs)
        wish = Wish(prompt, parameters_of(body), CHAT, bool(body.stream), call.received_at, traceparent_of(request))
        valid = await call.validate(wish)
        frame = Frame(body, services)
        if not body.stream:
            (collector,) = await collect(request, call, [valid])
            finish = collector.finish
            answer = frame.whole(collector.events, finish)
            headers = answer_headers(services.compute_type, len(prompt), finish)
            return Response(_encode(answer), 200, headers, "application/json")
        return EventStream(
            call,
            [(valid, ChatFrames(frame, body))],
            services.pulse,
            stream_headers(services.compute_type, len(prompt)),
            openai_response,
        )


def refuse_unsupported(body: ChatRequest) -> None:
    """Raises InvalidRequest for what would change the answer and cannot be done."""
    if body.n is not None and body.n != 1:
        raise InvalidRequest(f"`n` must be 1: several choices are not supported by this server. Given: {body.n}", "n")
    if body.tools:
        raise not_supported("tools")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise not_supported("response_format")


def parameters_of(body: ChatRequest) -> GenerateParameters:
    """A chat request in the words of the native API."""
    return GenerateParameters(
        temperature=body.temperature,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        typical_p=body.typical_p,
        do_sample=True,
        # OpenAI's newer name wins where both are sent.
        max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        min_tokens=body.min_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        ignore_eos_token=body.ignore_eos_token,
        seed=body.seed,
        top_n_tokens=body.top_logprobs,
        logit_bias=body.logit_bias,
        priority=body.priority,
        cache=body.cache,
        cache_salt=body.cache_salt,
    )


class Frame:
    """What all objects of one answer share."""

    def __init__(self, body: ChatRequest, services: Services) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = services.info.model_id if body.model in (None, "", "tgi") else body.model
        self.system_fingerprint = services.system_fingerprint
        self.has_logprobs = bool(body.logprobs)

    def whole(self, events: list[TokenEvent], finish: Finish) -> ChatCompletion:
        choice = Choice(
            index=0,
            message=AssistantMessage("assistant", finish.text),
            logprobs=Logprobs([_logprob(event) for event in events]) if self.has_logprobs else None,
            finish_reason=_FINISH_REASONS[finish.reason],
            stop_reason=UNSET if finish.stop is None else finish.stop,
            seed=UNSET if finish.seed is None else finish.seed,
        )
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            choices=[choice],
            usage=_usage(finish),
        )

    def chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            choices=choices,
            usage=usage,
        )


class ChatFrames:
    """Chunks of a streamed chat, `[DONE]` behind the last. Every delta names the role: TGI's clients need it."""

    def __init__(self, frame: Frame, body: ChatRequest) -> None:
        self._frame = frame
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._num_sent = 0  # characters
        # A plain chunk differs from the next in its text alone: cut one where the text stands.
        whole = _event(frame.chunk([_chunk_choice("")]))
        head, mark, tail = whole.rpartition(b'"content":""')
        assert mark
        self._head, self._tail = head + b'"content":', tail

    def prompt(self, tokens: list[PromptToken]) -> None:
        """Chats tell nothing of their prompt."""

    def close(self) -> bytes:
        return DONE

    def token(self, event: TokenEvent) -> bytes:
        text = "" if event.special else event.text
        if event.finish is not None:
            return self._last(event, event.finish)
        self._num_sent += len(text)
        if self._frame.has_logprobs:
            return _event(self._frame.chunk([_chunk_choice(text, Logprobs([_logprob(event)]))]))
        return b"%b%b%b" % (self._head, _encode(text), self._tail)

    def failure(self, error: TgiError) -> bytes:
        return b"data: %b\n\n%b" % (openai_body(error), DONE)

    def _last(self, event: TokenEvent, finish: Finish) -> bytes:
        # What was held back as a possible stop string may come with a special token, which has no text of its own.
        choice = _chunk_choice(
            finish.text[self._num_sent :], Logprobs([_logprob(event)]) if self._frame.has_logprobs else None, finish
        )
        events = _event(self._frame.chunk([choice]))
        if self._include_usage:
            events += _event(self._frame.chunk([], _usage(finish)))
        return events


def _event(chunk: ChatCompletionChunk) -> bytes:
    return b"data: %b\n\n" % _encode(chunk)


def _chunk_choice(text: str, logprobs: Logprobs | None = None, finish: Finish | None = None) -> ChunkChoice:
    return ChunkChoice(
        index=0,
        delta=Delta("assistant", text),
        logprobs=logprobs,
        finish_reason=None if finish is None else _FINISH_REASONS[finish.reason],
        stop_reason=UNSET if finish is None or finish.stop is None else finish.stop,
        seed=UNSET if finish is None or finish.seed is None else finish.seed,
    )


def _usage(finish: Finish) -> Usage:
    return Usage(
        finish.num_prompt,
        finish.num_generated,
        finish.num_prompt + finish.num_generated,
        PromptTokensDetails(finish.num_cached),
    )


def _logprob(event: TokenEvent) -> TokenLogprob:
    return TokenLogprob(
        event.text,
        shortest_f32(event.logprob),
        list(event.text.encode()),
        [TopLogprob(top.text, shortest_f32(top.logprob), list(top.text.encode())) for top in event.top_tokens],
    )
