"""The application: routes, middleware, errors. Knows no shard and no process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tgi.router.api import (
    cache,
    chat,
    completions,
    docs,
    generate,
    info,
    kserve,
    messages,
    metrics,
    openapi,
    responses,
    sagemaker,
    tokenize,
    vertex,
)
from tgi.router.api import operations as told
from tgi.router.api.errors import HANDLERS
from tgi.router.api.middleware import EXPOSED_HEADERS, Edge, RequireKey
from tgi.router.api.openapi import Document, Operation
from tgi.router.api.services import Services
from tgi.router.api.sse import EventStream
from tgi.router.api.tracing import Traced

if TYPE_CHECKING:
    from tgi.observability.otlp import Tracer


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of routes, for the application and for the document."""

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Response | EventStream]]
    operation: Operation | None  # None: part of /docs, which the document does not tell of
    is_guarded: bool = False  # asks for the API key where the server has one


def _open(path: str, endpoint: Callable[[Request], Awaitable[Response]], operation: Operation | None) -> Row:
    return Row("GET", path, endpoint, operation)


def _guarded(path: str, endpoint: Callable[[Request], Awaitable[Response | EventStream]], operation: Operation) -> Row:
    """What costs work, now or later."""
    return Row("POST", path, endpoint, operation, is_guarded=True)


ROUTES = (
    _guarded("/", generate.compat, told.COMPAT_GENERATE),
    _guarded("/generate", generate.generate, told.GENERATE),
    _guarded("/generate_stream", generate.generate_stream, told.GENERATE_STREAM),
    _guarded("/tokenize", tokenize.tokenize, told.TOKENIZE),
    _guarded("/chat_tokenize", tokenize.chat_tokenize, told.CHAT_TOKENIZE),
    _guarded("/v1/chat/completions", chat.chat_completions, told.CHAT_COMPLETIONS),
    _guarded("/v1/completions", completions.completions, told.COMPLETIONS),
    _guarded("/v1/responses", responses.responses, told.RESPONSES),
    _guarded("/v1/messages", messages.messages, told.MESSAGES),
    _guarded("/v1/messages/count_tokens", messages.count_tokens, told.COUNT_TOKENS),
    _guarded("/invocations", sagemaker.invocations, told.INVOCATIONS),
    _guarded("/vertex", vertex.vertex, told.vertex("vertex")),
    _guarded("/flush_cache", cache.flush, told.FLUSH_CACHE),
    _open("/", info.health, told.health("health_root")),
    _open("/health", info.health, told.health("health")),
    _open("/ping", info.health, told.health("ping")),
    _open("/info", info.info, told.INFO),
    _open("/metrics", metrics.metrics, told.METRICS),
    _open("/v1/models", info.models, told.MODELS),
    _open("/v1/models/{model_id:path}", info.model, told.MODEL),
    _open("/api-doc/openapi.json", openapi.document, told.OPENAPI),
    _open("/docs", docs.redirect, None),
    _open("/docs/", docs.page, None),
    _open("/docs/{name}", docs.asset, None),
)

# A model's name may hold slashes: the longer paths come first.
KSERVE_ROUTES = (
    _guarded(
        "/v2/models/{name:path}/versions/{version}/infer", kserve.infer, told.kserve_infer("kserve_version_infer")
    ),
    _guarded("/v2/models/{name:path}/infer", kserve.infer, told.kserve_infer("kserve_infer")),
    _open("/v2", kserve.server_metadata, told.KSERVE_SERVER),
    _open("/v2/health/live", kserve.live, told.KSERVE_LIVE),
    _open("/v2/health/ready", kserve.ready, told.KSERVE_READY),
    _open(
        "/v2/models/{name:path}/versions/{version}/ready",
        kserve.model_ready,
        told.kserve_model_ready("kserve_version_ready"),
    ),
    _open("/v2/models/{name:path}/ready", kserve.model_ready, told.kserve_model_ready("kserve_model_ready")),
    _open(
        "/v2/models/{name:path}/versions/{version}", kserve.model_metadata, told.kserve_model("kserve_version_metadata")
    ),
    _open("/v2/models/{name:path}", kserve.model_metadata, told.kserve_model("kserve_model_metadata")),
)


def table(
    kserve_routes: bool = False, predict_route: str | None = None, health_route: str | None = None
) -> tuple[Row, ...]:
    """The routes of a server, in the order in which they are looked at: what an operator has chosen wins."""
    chosen = []
    if predict_route is not None:
        chosen.append(_guarded(predict_route, vertex.vertex, told.vertex("vertex_predict")))
    if health_route is not None:
        chosen.append(_open(health_route, info.health, told.health("vertex_health", tag=told.CLOUDS)))
    taken = {(row.method, row.path) for row in chosen}
    rows = ROUTES + (KSERVE_ROUTES if kserve_routes else ())
    return (*chosen, *(row for row in rows if (row.method, row.path) not in taken))


def create_app(
    services: Services,
    api_key: str | None = None,
    cors_allow_origin: Sequence[str] = (),
    rows: Sequence[Row] = ROUTES,
    tracer: Tracer | None = None,
) -> ASGIApp:
    """`cors_allow_origin` empty: any origin. `tracer`: of what costs work; probes and scrapes make no spans."""
    guard = [Middleware(RequireKey, key=api_key)] if api_key else []
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(cors_allow_origin) or ["*"],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
    routes = [
        Route(
            row.path,
            row.endpoint,
            methods=[row.method],
            middleware=[*guard, *_traced(row, tracer)] if row.is_guarded else None,
        )
        for row in rows
    ]
    # Where two routes share a path, each would name its own method only.
    routes += [Route(path, _WrongMethod(methods)) for path, methods in _shared_paths(rows).items()]
    app = Starlette(routes=routes, middleware=[cors], exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # an unknown path is a 404, as in TGI
    app.state.services = services
    app.state.document = Document(rows, services.infer.validator.limits, services.info.version, bool(api_key))
    return Edge(app)


def _traced(row: Row, tracer: Tracer | None) -> list[Middleware]:
    if tracer is None or row.operation is None:
        return []
    return [Middleware(Traced, tracer=tracer, route=row.path, operation_id=row.operation.id)]


def _shared_paths(rows: Sequence[Row]) -> dict[str, list[str]]:
    methods: dict[str, list[str]] = {}
    for row in rows:
        methods.setdefault(row.path, []).append(row.method)
    return {path: found for path, found in methods.items() if len(found) > 1}


class _WrongMethod:
    """Answers every method; a class, since Starlette gives a function GET alone."""

    def __init__(self, methods: Sequence[str]) -> None:
        allowed = {*methods, "HEAD"} if "GET" in methods else set(methods)
        self._headers = {"allow": ", ".join(sorted(allowed))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(405, headers=self._headers)
