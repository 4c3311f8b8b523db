"""POST /tokenize: the tokens of a prompt and where they lie in its bytes."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgi.router.api.body import BodyReader
from tgi.router.api.services import services_of
from tgi.router.schema.generate import GenerateRequest, TokenSlice

_body = BodyReader(GenerateRequest)

LONG_TEXT = 16_384
"""Characters. The answer for a longer text takes more than some milliseconds: it is made beside the event loop."""


async def tokenize(request: Request) -> Response:
    """Takes no permit. As in TGI, special tokens are added (empty text, place 0) and `truncate` does nothing."""
    services = services_of(request)
    body = await _body.read(request, services.payload_limit)
    encoding = await services.encoder.encode(body.inputs, add_special_tokens=True, with_offsets=True)
    ids = memoryview(encoding.ids).cast("I").tolist()
    if len(body.inputs) <= LONG_TEXT:
        answer = _answer(body.inputs, ids, encoding.offsets)
    else:
        answer = await asyncio.to_thread(_answer, body.inputs, ids, encoding.offsets)
    return Response(answer, media_type="application/json")


def _answer(text: str, ids: list[int], offsets: list[tuple[int, int]]) -> bytes:
    return msgspec.json.encode(_slices(text, ids, offsets))


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
