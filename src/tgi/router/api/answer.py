"""Whole answers: waiting for them, noticing meanwhile that the client has gone, choosing the best, rendering them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf, isnan

from starlette.requests import Request

from tgi.router.api.errors import ClientGone
from tgi.router.infer import Call, Collector
from tgi.router.validation.request import ValidRequest

LONG_ANSWER = 512
"""Tokens. What has more is rendered beside the event loop: it may take more than a millisecond."""


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
        call.cancel()  # no event follows: what still waits for one is forgotten


def mean_logprob(collector: Collector) -> float:
    """By which the best of several answers is chosen."""
    mean = sum(event.logprob for event in collector.events) / len(collector.events)
    return -inf if isnan(mean) else mean


async def rendered(make: Callable[[], bytes], collectors: Sequence[Collector]) -> bytes:
    """What `make` makes of complete answers; it must not touch anything else that changes."""
    num_tokens = sum(len(collector.events) + len(collector.prompt_tokens) for collector in collectors)
    return await asyncio.to_thread(make) if num_tokens > LONG_ANSWER else make()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
