"""POST /vertex, and the path that Vertex AI chooses for it: several prompts or chats, their texts in the same order."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from tgi.errors import InvalidRequest
from tgi.router.api import chat, generate
from tgi.router.api.body import BodyReader, wrong_shape
from tgi.router.api.inner import Part, answers, check_count
from tgi.router.api.services import services_of
from tgi.router.schema.info import NativeError
from tgi.router.schema.vertex import VertexRequest, VertexResponse

PATH = "/vertex"


class _Keys(Struct):
    inputs: Any = None
    messages: Any = None
    stream: Any = None


_body = BodyReader(VertexRequest)
_keys = BodyReader(_Keys)
_encode = msgspec.json.Encoder().encode

_NO_INSTANCES = NativeError("Input validation error", "Input validation error")  # TGI's words


async def vertex(request: Request) -> Response:
    """The first instance that fails fails them all, with its own status."""
    request.scope["path"] = PATH  # whatever path Vertex AI has chosen: errors are native ones
    body = await _body.read(request, services_of(request).payload_limit)
    if not body.instances:
        return Response(_encode(_NO_INSTANCES), 422, media_type="application/json")
    check_count(request, len(body.instances))
    parts = [_part(raw, f"instances[{index}]") for index, raw in enumerate(body.instances)]
    predictions = [_text(answer) for answer in await answers(request, parts)]
    return Response(_encode(VertexResponse(predictions)), media_type="application/json")


def _part(raw: Raw, place: str) -> Part:
    keys = _keys.decode(raw, place)
    if keys.stream:
        raise InvalidRequest(f"`stream` is not supported by Vertex AI's predictions (in {place})", "stream")
    if keys.inputs is not None:
        return Part(place, "/generate", generate.generate, bytes(raw))
    if keys.messages is not None:
        return Part(place, "/v1/chat/completions", chat.chat_completions, bytes(raw))
    raise wrong_shape("expected `inputs` or `messages`", place)


def _text(answer: bytes) -> str:
    fields = msgspec.json.decode(answer)
    if "generated_text" in fields:
        return fields["generated_text"]
    message = fields["choices"][0]["message"]
    # A chat that calls tools has no other text than its calls.
    return message.get("content") or msgspec.json.encode(message.get("tool_calls") or []).decode()
