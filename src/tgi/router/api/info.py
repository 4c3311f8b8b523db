"""GET /info, /v1/models, /health and its aliases."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tgi.router.api.services import services_of
from tgi.router.schema.info import Model, ModelList, NativeError

_encode = msgspec.json.Encoder().encode


async def info(request: Request) -> Response:
    return _json(services_of(request).info)


async def models(request: Request) -> Response:
    return _json(ModelList("list", [_model(request)]))


async def model(request: Request) -> Response:
    """One model of the list, by its id, which may hold slashes."""
    if request.path_params["model_id"] not in (services_of(request).info.model_id, "tgi"):
        raise HTTPException(404, f"The model `{request.path_params['model_id']}` does not exist")
    return _json(_model(request))


async def health(request: Request) -> Response:
    """200 while the shard lives and moves, else 503. Never runs a generation, so a busy server is a healthy one."""
    if await services_of(request).infer.backend.is_healthy():
        return Response()
    return Response(_encode(NativeError("unhealthy", "healthcheck")), 503, media_type="application/json")


def _model(request: Request) -> Model:
    model_id = services_of(request).info.model_id
    return Model(model_id, "model", 0, model_id)


def _json(value: msgspec.Struct) -> Response:
    return Response(_encode(value), media_type="application/json")
