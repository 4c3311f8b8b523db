"""The application: routes, middleware, errors. Knows no shard and no process."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tgi.router.api import chat, generate, info, metrics, tokenize
from tgi.router.api.errors import HANDLERS
from tgi.router.api.middleware import Edge, RequireKey
from tgi.router.api.services import Services

OPEN = (
    ("GET", "/", info.health),
    ("GET", "/health", info.health),
    ("GET", "/ping", info.health),
    ("GET", "/info", info.info),
    ("GET", "/metrics", metrics.metrics),
    ("GET", "/v1/models", info.models),
    ("GET", "/v1/models/{model_id:path}", info.model),
)

COMPUTE = (
    ("POST", "/", generate.compat),
    ("POST", "/generate", generate.generate),
    ("POST", "/generate_stream", generate.generate_stream),
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/tokenize", tokenize.tokenize),
)
"""These ask for the API key where the server has one."""


def create_app(services: Services, api_key: str | None = None, cors_allow_origin: Sequence[str] = ()) -> ASGIApp:
    """`cors_allow_origin` empty: any origin."""
    guard = [Middleware(RequireKey, key=api_key)] if api_key else []
    # Compute routes first: where two routes share a path, the first one found answers for its method.
    routes = [Route(path, endpoint, methods=[method], middleware=guard) for method, path, endpoint in COMPUTE]
    routes += [Route(path, endpoint, methods=[method]) for method, path, endpoint in OPEN]
    # Each route of a shared path would name its own method only.
    routes.append(Route("/", _WrongMethod({"allow": "GET, HEAD, POST"})))
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(cors_allow_origin) or ["*"],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )
    app = Starlette(routes=routes, middleware=[cors], exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # an unknown path is a 404, as in TGI
    app.state.services = services
    return Edge(app)


class _WrongMethod:
    """Answers every method; a class, since Starlette gives a function GET alone."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(405, headers=self._headers)
