"""POST /tokenize and /chat_tokenize: the tokens of a prompt and where they lie in its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgi.router.api.body import BodyReader, is_long
from tgi.router.api.chat_prompt import prepare_chat
from tgi.router.api.services import OffsetEncoder, services_of
from tgi.router.schema.chat import ChatRequest, ChatTokens
from tgi.router.schema.generate import GenerateRequest, TokenSlice
from tgi.router.validation.door import CHAT, NATIVE

_body = BodyReader(GenerateRequest)
_chat_body = BodyReader(ChatRequest)
_encode = msgspec.json.Encoder().encode

LONG_TEXT = 16_384
"""Characters. The answer for a longer text takes more than some milliseconds: it is made beside the event loop."""


async def tokenize(request: Request) -> Response:
    """Takes no permit. As in TGI, special tokens are added (empty text, place 0) and `truncate` does nothing."""
    services = services_of(request)
    body = await _body.read(request, services.payload_limit)
    return await _respond(services.encoder, body.inputs, NATIVE.add_special_tokens, lambda slices: slices)


async def chat_tokenize(request: Request) -> Response:
    """The prompt of a chat as the chat route makes it, and its tokens. Takes no permit."""
    services = services_of(request)
    body = await _chat_body.read(request, services.payload_limit)
    text = (await prepare_chat(services, body, is_long(request))).text
    add_special_tokens = body.add_special_tokens or CHAT.add_special_tokens
    return await _respond(services.encoder, text, add_special_tokens, lambda slices: ChatTokens(slices, text))


async def _respond(
    encoder: OffsetEncoder, text: str, add_special_tokens: bool, answer: Callable[[list[TokenSlice]], object]
) -> Response:
    encoding = await encoder.encode(text, add_special_tokens, with_offsets=True)

    def make() -> bytes:
        ids = memoryview(encoding.ids).cast("I").tolist()
        return _encode(answer(_slices(text, ids, encoding.offsets)))

    body = make() if len(text) <= LONG_TEXT else await asyncio.to_thread(make)
    return Response(body, media_type="application/json")


def _slices(text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[TokenSlice]:
    """Places in characters -> places in UTF-8 bytes, as TGI counts."""
    if text.isascii():
        return [TokenSlice(ids[i], text[start:stop], start, stop) for i, (start, stop) in enumerate(offsets)]
    byte_at = [0]
    for character in text:
        byte_at.append(byte_at[-1] + len(character.encode()))
    return [
        TokenSlice(ids[i], text[start:stop], byte_at[start], byte_at[stop]) for i, (start, stop) in enumerate(offsets)
    ]
