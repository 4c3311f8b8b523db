"""GET /info, /v1/models, /health and its aliases."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgi.router.api.errors import Refused
from tgi.router.api.services import services_of
from tgi.router.schema.info import Info, Model, ModelList, NativeError

_encode = msgspec.json.Encoder().encode


async def info(request: Request) -> Response:
    return _json(_present(request))


async def models(request: Request) -> Response:
    return _json(ModelList("list", [_model(request)]))


async def model(request: Request) -> Response:
    """One model of the list, by its id, which may hold slashes."""
    asked = request.path_params["model_id"]
    if asked not in (services_of(request).info.model_id, "tgi"):
        raise Refused(f"The model `{asked}` does not exist", "not_found", "model", "model_not_found", 404)
    return _json(_model(request))


async def health(request: Request) -> Response:
    """200 while the shard lives and moves, else 503. Never runs a generation, so a busy server is a healthy one."""
    if await services_of(request).infer.backend.is_healthy():
        return Response()
    return Response(_encode(NativeError("unhealthy", "healthcheck")), 503, media_type="application/json")


def _present(request: Request) -> Info:
    """A model server that was started again may have less room than before."""
    services = services_of(request)
    limits = services.infer.validator.limits
    return msgspec.structs.replace(
        services.info, max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens
    )


def _model(request: Request) -> Model:
    info = _present(request)
    return Model(
        id=info.model_id,
        object="model",
        created=0,
        owned_by=info.model_id,
        root=info.model_id,
        max_model_len=info.max_total_tokens,
    )


def _json(value: msgspec.Struct) -> Response:
    return Response(_encode(value), media_type="application/json")
