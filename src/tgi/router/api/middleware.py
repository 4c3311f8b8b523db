"""Pure ASGI middleware: the outermost edge (request id, the server's own `send`) and the API key."""

from __future__ import annotations

import hmac
import re
import secrets

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RAW_SEND = "tgi.raw_send"
"""Scope key of the server's own `send`. Layers only care for the head of a response, so the events of a stream go past
them: each layer would cost every token a coroutine."""

REQUEST_ID = "tgi.request_id"
"""Scope key of a request's label (bytes)."""

EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
    "x-prompt-tokens",
    "x-generated-tokens",
    "retry-after",
)
"""What a page of another origin may read of an answer's head, beside what every browser shows."""

_LABEL = re.compile(rb"[\x21-\x7e]{1,128}")


class Edge:
    """Around everything. Echoes `x-request-id`, or draws one: a label for the client's logs, never an id of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = _header(scope, b"x-request-id")
        if label is None or not _LABEL.fullmatch(label):
            label = secrets.token_hex(12).encode()
        scope[REQUEST_ID] = label
        scope[RAW_SEND] = send

        async def with_label(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label)]
            await send(message)

        await self._app(scope, receive, with_label)


class RequireKey:
    """Refuses a request without `Authorization: Bearer <key>` or, as Anthropic's clients send it, `x-api-key: <key>`.

    The scheme's case does not matter, the key's does.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        if not self._opens(bearer) and not self._opens(_header(scope, b"x-api-key") or b""):
            raise HTTPException(401, "Incorrect API key: send it as `Authorization: Bearer <key>`", _CHALLENGE)
        await self._app(scope, receive, send)

    def _opens(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self._key)


def request_id_of(scope: Scope) -> str:
    """The label under which the client may speak of this request."""
    return scope[REQUEST_ID].decode()


_CHALLENGE = {"www-authenticate": "Bearer"}


def _header(scope: Scope, name: bytes) -> bytes | None:
    """ASGI servers give header names in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None
