"""Request body -> msgspec struct, refused with TGI's statuses and texts: 415, then 413, then 400, then 422.

A body is read once per request, whoever asks: a route that looks into it hands it on to the one that answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from tgi.router.api.errors import BodyRefused, ClientGone

T = TypeVar("T")

_PATH = re.compile(r"^(?P<reason>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing field `([^`]+)`")


BODY = "tgi.body"
"""Scope key of a request's bytes, once they have been read."""

LONG_BODY = 32_768
"""Bytes. What goes through all of a longer one takes more than some milliseconds."""


class BodyReader(Generic[T]):
    """Reads bodies of one type. One decoder, made once."""

    def __init__(self, wanted: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(wanted)

    async def read(self, request: Request, limit: int) -> T:
        """Raises BodyRefused; ClientGone when the client hangs up before its body is complete. `limit` in bytes."""
        return self.decode(await read_bytes(request, limit))

    def decode(self, body: bytes | msgspec.Raw, where: str = "") -> T:
        """Raises BodyRefused. `where`: the place of `body` in the request, where it is a part of it."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise wrong_shape(str(error), where) from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise BodyRefused(400, f"Failed to parse the request body as JSON: {error}") from error


async def read_bytes(request: Request, limit: int) -> bytes:
    """The whole body, said to be JSON. Raises as `BodyReader.read` does."""
    body = request.scope.get(BODY)
    if body is None:
        if not _is_json(request.headers.get("content-type", "")):
            raise BodyRefused(415, "Expected request with `Content-Type: application/json`")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise BodyRefused(415, f"Expected a body that is not compressed. Given: `Content-Encoding: {coding}`")
        body = request.scope[BODY] = await _read_up_to(request, limit)
    return body


def is_long(request: Request) -> bool:
    """Of a request whose body has been read."""
    return len(request.scope[BODY]) > LONG_BODY


async def aside(request: Request, work: Callable[[], T]) -> T:
    """Result of `work`, done beside the event loop where the request's body is long."""
    return await asyncio.to_thread(work) if is_long(request) else work()


def wrong_shape(message: str, where: str = "") -> BodyRefused:
    """msgspec says "reason - at `$.path`"; TGI puts the path first and calls what is not there a missing field."""
    message = message.replace("Object missing required field", "missing field")
    found = _PATH.match(message)
    path = found["path"] if found else ""
    place = f"{where}.{path}" if where and path else where or path
    missing = _MISSING.search(message)
    param = ".".join(filter(None, (place, missing and missing[1])))
    detail = f"{place}: {found['reason'] if found else message}" if place else message
    text = f"Failed to deserialize the JSON body into the target type: {detail}"
    return BodyRefused(422, text, param or None)


async def _read_up_to(request: Request, limit: int) -> bytes:
    too_large = BodyRefused(
        413, f"Failed to buffer the request body: length limit exceeded ({limit} bytes, see --payload-limit)"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(chunks)


def _is_json(content_type: str) -> bool:
    media = content_type.partition(";")[0].strip().lower()
    return media == "application/json" or (media.startswith("application/") and media.endswith("+json"))
