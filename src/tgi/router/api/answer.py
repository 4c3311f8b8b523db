"""Waiting for whole answers, and noticing meanwhile that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request

from tgi.router.api.errors import ClientGone
from tgi.router.infer import Call, Collector
from tgi.router.validation.request import ValidRequest


async def collect(request: Request, call: Call, valids: Sequence[ValidRequest]) -> list[Collector]:
    """Run an accepted request's answers to their ends. Raises the first TgiError, or ClientGone after cancelling."""
    collectors = [Collector() for _ in valids]
    for valid, collector in zip(valids, collectors, strict=True):
        call.schedule(valid, collector)
    answered = asyncio.gather(*[collector.done for collector in collectors])
    watch = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((watch, answered), return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            answered.result()
            return collectors
        call.cancel()
        raise ClientGone
    finally:
        watch.cancel()
        answered.cancel()
        call.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
