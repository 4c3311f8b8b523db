"""POST /v1/messages, plain and streamed, and /v1/messages/count_tokens: Anthropic's protocol over the chat's way."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from tgi.errors import TgiError
from tgi.router.api.answer import collect, rendered
from tgi.router.api.body import BodyReader, aside, is_long
from tgi.router.api.chat_prompt import prepare_chat, validate_chat
from tgi.router.api.errors import REQUEST_ID_HEADER, anthropic_response
from tgi.router.api.headers import answer_headers, stream_headers
from tgi.router.api.messages_chat import NAMES, chat_of
from tgi.router.api.messages_frames import Look, MessageFrames, message
from tgi.router.api.middleware import request_id_of
from tgi.router.api.openai_answer import encode as _encode
from tgi.router.api.openai_answer import model_name
from tgi.router.api.services import Services, services_of
from tgi.router.api.sse import EventStream
from tgi.router.api.translation import named
from tgi.router.schema.messages import CountTokensRequest, MessagesRequest, TokenCount
from tgi.router.validation.door import CHAT

_body = BodyReader(MessagesRequest)
_count_body = BodyReader(CountTokensRequest)

# `max_tokens` must always be given: clients send a large number, and leave it to the server to end at the context's.
_DOOR = replace(CHAT, cut_to_fit=True)


async def messages(request: Request) -> Response | EventStream:
    services = services_of(request)
    body = await _body.read(request, services.payload_limit)
    with services.infer.accept() as call, named(NAMES):
        chat = await aside(request, lambda: chat_of(body, body.max_tokens, body.stop_sequences))
        prompt = await prepare_chat(services, chat, is_long(request))
        valid = await validate_chat(request, chat, prompt, call, _DOOR)
        look = _look(request, services, body, valid.num_prompt_tokens)
        if body.stream:
            headers = [
                *stream_headers(services.compute_type, len(prompt.text)),
                (REQUEST_ID_HEADER.encode(), look.request_id.encode()),
            ]
            answers = [(valid, MessageFrames(look, prompt.parser()))]
            return EventStream(call, answers, services.pulse, headers, _early_error(look.request_id))
        collectors = await collect(request, call, [valid])
    (collector,) = collectors
    answer = await rendered(lambda: _encode(message(look, collector, prompt.parser())), collectors)
    headers = answer_headers(services.compute_type, len(prompt.text), collector.finish)
    return Response(answer, 200, headers | {REQUEST_ID_HEADER: look.request_id}, "application/json")


async def count_tokens(request: Request) -> Response:
    """Of the prompt as `messages` makes it. Takes no permit."""
    services = services_of(request)
    body = await _count_body.read(request, services.payload_limit)
    with named(NAMES):
        chat = await aside(request, lambda: chat_of(body))
        text = (await prepare_chat(services, chat, is_long(request))).text
    num_tokens = len((await services.encoder.encode(text, _DOOR.add_special_tokens)).ids) // 4
    headers = {REQUEST_ID_HEADER: request_id_of(request.scope)}
    return Response(_encode(TokenCount(num_tokens)), 200, headers, "application/json")


def _look(request: Request, services: Services, body: MessagesRequest, num_prompt: int) -> Look:
    return Look(
        id=f"msg_{secrets.token_hex(12)}",
        model=model_name(services, body.model),
        request_id=request_id_of(request.scope),
        num_prompt=num_prompt,
        max_tokens=body.max_tokens,
    )


def _early_error(request_id: str) -> Callable[[TgiError], Response]:
    return lambda error: anthropic_response(error, request_id)
