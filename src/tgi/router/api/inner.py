"""Requests that hold several: each part goes through the handler of the route that it is a body of, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from tgi.errors import InvalidRequest, Overloaded
from tgi.router.api.body import BODY
from tgi.router.api.errors import BodyRefused
from tgi.router.api.services import services_of
from tgi.router.api.sse import EventStream

Endpoint = Callable[[Request], Awaitable[Response | EventStream]]


@dataclass(frozen=True, slots=True)
class Part:
    place: str  # in the request, for messages: "instances[2]"
    path: str
    endpoint: Endpoint
    body: bytes


def check_count(request: Request, num_parts: int) -> None:
    """Before the parts are made. Raises InvalidRequest for more than the server ever answers at once."""
    most = services_of(request).infer.max_answers
    if num_parts > most:
        raise InvalidRequest(
            f"one request may ask for at most {most} answers (see --max-concurrent-requests). Given: {num_parts}"
        )


async def answers(request: Request, parts: Sequence[Part]) -> list[bytes]:
    """Bodies of the parts' answers, in their order. None of them may ask for a stream.

    The first error ends all and is raised with its place. Raises Overloaded before any starts when not all could.
    """
    if len(parts) > services_of(request).infer.free_permits:
        raise Overloaded
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_answer(request, part)) for part in parts]
    except* Exception as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _answer(request: Request, part: Part) -> bytes:
    inner = Request({**request.scope, "path": part.path, BODY: part.body}, request.receive)
    try:
        response = await part.endpoint(inner)
    except BodyRefused as error:
        raise BodyRefused(error.status, f"{error.text} (in {part.place})") from error
    except InvalidRequest as error:
        raise type(error)(f"{error} (in {part.place})", error.param) from error
    assert isinstance(response, Response)
    return bytes(response.body)
