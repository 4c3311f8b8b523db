"""POST /v1/responses, plain and streamed: OpenAI's newer protocol over the chat's way. Nothing is kept of an answer."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from tgi.router.api.answer import collect, rendered
from tgi.router.api.body import BodyReader, aside, is_long
from tgi.router.api.chat_prompt import prepare_chat, validate_chat
from tgi.router.api.errors import openai_response
from tgi.router.api.headers import answer_headers, stream_headers
from tgi.router.api.openai_answer import encode as _encode
from tgi.router.api.openai_answer import model_name
from tgi.router.api.responses_chat import NAMES, chat_of
from tgi.router.api.responses_frames import Look, ResponseFrames, response
from tgi.router.api.services import Services, services_of
from tgi.router.api.sse import EventStream
from tgi.router.api.translation import named
from tgi.router.schema.chat import ChatRequest
from tgi.router.schema.responses import ReasoningConfig, ResponseObject, ResponsesRequest, TextConfig
from tgi.router.validation.door import CHAT

_body = BodyReader(ResponsesRequest)

_DOOR = replace(CHAT, inputs="input", max_new_tokens="max_output_tokens")

_PLAIN_TEXT = {"type": "text"}


async def responses(request: Request) -> Response | EventStream:
    services = services_of(request)
    body = await _body.read(request, services.payload_limit)
    with services.infer.accept() as call, named(NAMES):
        chat = await aside(request, lambda: chat_of(body))
        prompt = await prepare_chat(services, chat, is_long(request))
        valid = await validate_chat(request, chat, prompt, call, _DOOR)
        look = _look(services, body, chat)
        if body.stream:
            headers = stream_headers(services.compute_type, len(prompt.text))
            answers = [(valid, ResponseFrames(look, prompt.parser()))]
            return EventStream(call, answers, services.pulse, headers, openai_response)
        collectors = await collect(request, call, [valid])
    (collector,) = collectors
    answer = await rendered(lambda: _encode(response(look, collector, prompt.parser())), collectors)
    headers = answer_headers(services.compute_type, len(prompt.text), collector.finish)
    return Response(answer, 200, headers, "application/json")


def _look(services: Services, body: ResponsesRequest, chat: ChatRequest) -> Look:
    return Look(
        start=_start(services, body),
        vocabulary=services.vocabulary,
        num_alternatives=(chat.top_logprobs or 0) if chat.logprobs else None,
    )


def _start(services: Services, body: ResponsesRequest) -> ResponseObject:
    """What the request has said, with OpenAI's defaults for what it has not."""
    text = body.text or TextConfig()
    return ResponseObject(
        id=f"resp_{secrets.token_hex(12)}",
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model_name(services, body.model),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or ReasoningConfig(),
        safety_identifier=body.safety_identifier,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=TextConfig(format=text.format or _PLAIN_TEXT, verbosity=text.verbosity),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
