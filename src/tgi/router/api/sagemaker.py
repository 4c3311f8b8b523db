"""POST /invocations: SageMaker's one route for the bodies of three. Looks which one it is, and hands the request on.

What a body is, its keys say, in TGI's order: `inputs`, then `messages`, then `prompt`. The request goes on under the
other route's path, so its errors look as they do there.
"""

from __future__ import annotations

from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from tgi.router.api import chat, completions, generate
from tgi.router.api.body import BodyReader, read_bytes, wrong_shape
from tgi.router.api.inner import Endpoint
from tgi.router.api.services import services_of
from tgi.router.api.sse import EventStream

_NULL = Raw(b"null")


class _Keys(Struct):
    inputs: Raw = _NULL
    messages: Raw = _NULL
    prompt: Raw = _NULL


_keys = BodyReader(_Keys)

_ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("inputs", "/", generate.compat),
    ("messages", "/v1/chat/completions", chat.chat_completions),
    ("prompt", "/v1/completions", completions.completions),
)


async def invocations(request: Request) -> Response | EventStream:
    keys = _keys.decode(await read_bytes(request, services_of(request).payload_limit))
    for key, path, endpoint in _ROUTES:
        if bytes(getattr(keys, key)) != b"null":
            request.scope["path"] = path
            return await endpoint(request)
    raise wrong_shape("expected one of `inputs`, `messages` and `prompt`")
