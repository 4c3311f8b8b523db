"""POST /v1/chat/completions, plain and streamed."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from tgi.errors import InvalidRequest
from tgi.router.api.answer import collect, rendered
from tgi.router.api.body import BodyReader, is_long
from tgi.router.api.chat_frames import ChatFrames, Look, chat_completion
from tgi.router.api.chat_prompt import ChatPrompt, prepare_chat, validate_chat
from tgi.router.api.errors import openai_response
from tgi.router.api.headers import answer_headers, stream_headers
from tgi.router.api.openai_answer import Tally, head_of, joined, stream_usage
from tgi.router.api.openai_answer import encode as _encode
from tgi.router.api.services import Services, services_of
from tgi.router.api.sse import EventStream
from tgi.router.infer import Call
from tgi.router.schema.chat import ChatRequest
from tgi.router.validation.door import CHAT, Door
from tgi.router.validation.request import ValidRequest, fork

_body = BodyReader(ChatRequest)


async def chat_completions(request: Request) -> Response | EventStream:
    services = services_of(request)
    body = await _body.read(request, services.payload_limit)
    n = 1 if body.n is None else body.n
    with services.infer.accept(max(n, 1), "n") as call:
        if n < 1:
            raise InvalidRequest(f"`n` must be strictly positive. Given: {n}", "n")
        prompt = await prepare_chat(services, body, is_long(request))
        valids = fork(await validate_chat(request, body, prompt, call, _door_of(body)), n)
        if body.stream:
            return _stream(services, body, prompt, call, valids)
        collectors = await collect(request, call, valids)
    tally = Tally([valids[0].num_prompt_tokens])
    look = _look(services, body)

    def make() -> bytes:
        return _encode(chat_completion(look, tally, collectors, [prompt.parser() for _ in collectors]))

    answer = await rendered(make, collectors)
    finish = joined([collector.finish for collector in collectors])
    headers = answer_headers(services.compute_type, len(prompt.text), finish)
    return Response(answer, 200, headers, "application/json")


def _stream(
    services: Services, body: ChatRequest, prompt: ChatPrompt, call: Call, valids: list[ValidRequest]
) -> EventStream:
    look, usage = _look(services, body), stream_usage(body.stream_options)
    num_prompt = valids[0].num_prompt_tokens
    tally = Tally([num_prompt])
    answers = [
        (valid, ChatFrames(look, tally, usage, num_prompt, index, prompt.parser()))
        for index, valid in enumerate(valids)
    ]
    headers = stream_headers(services.compute_type, len(prompt.text))
    return EventStream(call, answers, services.pulse, headers, openai_response)


def _door_of(body: ChatRequest) -> Door:
    """Messages name the fields that the client used."""
    door = CHAT if body.max_completion_tokens is None else _NEWER_NAME
    return replace(door, add_special_tokens=True) if body.add_special_tokens else door


_NEWER_NAME = replace(CHAT, max_new_tokens="max_completion_tokens")


def _look(services: Services, body: ChatRequest) -> Look:
    return Look(
        head=head_of(services, "chatcmpl", body.model),
        vocabulary=services.vocabulary,
        num_alternatives=(body.top_logprobs or 0) if body.logprobs else None,
        keep_special=body.skip_special_tokens is False,
    )
