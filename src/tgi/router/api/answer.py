"""Waiting for a whole answer, and noticing meanwhile that the client has gone."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from tgi.router.api.errors import ClientGone
from tgi.router.backend import Finish
from tgi.router.infer import Call, Collector
from tgi.router.validation.request import ValidRequest


async def collect(request: Request, call: Call, valid: ValidRequest) -> tuple[Collector, Finish]:
    """Run an accepted request to its end. Raises its TgiError, or ClientGone after cancelling it."""
    collector = Collector()
    call.schedule(valid, collector)
    watch = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((watch, collector.done), return_when=asyncio.FIRST_COMPLETED)
        if collector.done.done():
            return collector, collector.done.result()
        call.cancel()
        raise ClientGone
    finally:
        watch.cancel()
        call.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
