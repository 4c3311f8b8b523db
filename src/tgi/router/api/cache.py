"""POST /flush_cache: for operators, after a change that cached prefixes should not outlive, or before a measurement."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgi.router.api.services import services_of
from tgi.router.schema.info import FlushedCache


async def flush(request: Request) -> Response:
    """Whatever the body is. Running requests go on, and keep the blocks that they use."""
    flushed = services_of(request).infer.backend.flush_cache()
    answer = FlushedCache(flushed_blocks=flushed.flushed, live_blocks=flushed.live)
    return Response(msgspec.json.encode(answer), media_type="application/json")
