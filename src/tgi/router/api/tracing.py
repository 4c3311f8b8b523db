"""A span around each request of a route, named as TGI names its handlers. Only part of an application that traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tgi.observability.tracing import entered
from tgi.router.api.headers import traceparent_of_caller

if TYPE_CHECKING:
    from tgi.observability.otlp import Tracer

# Where one handler has several paths, each has an operation of its own in the document.
_HANDLERS = {"vertex": "vertex_compatibility", "vertex_predict": "vertex_compatibility"}


class Traced:
    """Inside, the request's span is the current one. It ends with the response, a stream's with its last event."""

    def __init__(self, app: ASGIApp, tracer: Tracer, route: str, operation_id: str) -> None:
        self._app = app
        self._tracer = tracer
        self._name = _HANDLERS.get(operation_id, operation_id)
        self._attributes = {"http.request.method": "POST", "http.route": route}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = self._tracer.begin(self._name, traceparent_of_caller(scope), self._attributes)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.tell({"http.response.status_code": status})
                if status >= 400:
                    span.fail(f"HTTP {status}")
            await send(message)

        try:
            with entered(span):
                await self._app(scope, receive, noting)
        except BaseException as error:
            span.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            span.end()
