"""Joining the shard: wait until it answers, have it size its KV cache, and again whenever it was started anew.

Knows what was asked for, not who asks.
"""

from __future__ import annotations

import asyncio
import logging

from tgi.enums import Phase
from tgi.errors import StartupError, Unavailable
from tgi.router.config import RouterConfig
from tgi.shard_client.client import ShardClient
from tgi.shard_client.messages import ShardInfo, WarmupRequest, WarmupResult

logger = logging.getLogger(__name__)

SHARD_RETRY_S = 0.05
SHARD_REMINDER_S = 30.0
WATCH_S = 2.0  # between two questions while the shard warms up
HEALTH_TIMEOUT_S = 10.0


async def warm_up(client: ShardClient, config: RouterConfig) -> tuple[ShardInfo, WarmupResult]:
    """Wait for the shard, then have it size its KV cache. The launcher ends us if the shard never comes."""
    info = await _wait_for_shard(client, config.master_shard_uds_path)
    if config.host_cache_bytes and not caches_prefixes(config, info):
        why = "prefix caching is off: leave it out, or set PREFIX_CACHING=1"
        if config.prefix_caching:
            why = "this model shares none: leave it out"
        raise StartupError(f"Argument validation error: `host_cache_bytes` is for cached prefixes, but {why}")
    logger.info("Warming up model")
    warm = await _warmed(client, config)
    check(config, info, warm)
    logger.info("Setting max batch total tokens to %d", warm.max_batch_total_tokens)
    return info, warm


def _warmup_request(config: RouterConfig) -> WarmupRequest:
    return WarmupRequest(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_rows=config.max_batch_size or config.max_concurrent_requests,
        max_input_tokens=config.max_input_tokens,
        max_total_tokens=config.max_total_tokens,
        max_batch_total_tokens=config.max_batch_total_tokens,
        host_cache_bytes=config.host_cache_bytes,
    )


async def warm_up_again(client: ShardClient, config: RouterConfig, first: ShardInfo) -> WarmupResult:
    """Of a shard that may have been started again; one that still runs answers at once. Raises Unavailable when it is
    not there, StartupError when it cannot take over: what was validated for one model means nothing to another.
    """
    info = await client.info()
    if (info.model_type, info.vocab_size, info.speculate) != (first.model_type, first.vocab_size, first.speculate):
        raise StartupError(
            f"the model server came back with another model: {info.model_type} of {info.vocab_size} ids instead of "
            f"{first.model_type} of {first.vocab_size}; restart the router too"
        )
    return await _warmed(client, config)


async def _warmed(client: ShardClient, config: RouterConfig) -> WarmupResult:
    """Takes as long as it takes, while the shard answers Health. Raises Unavailable or StartupError."""
    warming = asyncio.ensure_future(client.warmup(_warmup_request(config)))
    watching = asyncio.create_task(_until_unwell(client))
    try:
        await asyncio.wait([warming, watching], return_when=asyncio.FIRST_COMPLETED)
        if not warming.done():
            raise Unavailable(f"the model server does not come back from its warm-up: {watching.result()}")
        return await warming
    finally:
        for task in (warming, watching):
            task.cancel()
        await asyncio.gather(warming, watching, return_exceptions=True)


async def _until_unwell(client: ShardClient) -> str:
    """What is wrong, once something is; twice in a row, since whoever was stopped himself finds others silent."""
    wrong: str | None = None
    while True:
        await asyncio.sleep(WATCH_S)
        before, wrong = wrong, None
        try:
            health = await client.health(HEALTH_TIMEOUT_S)
            if health.is_hung or health.phase == Phase.FAILED:
                wrong = f"it has been {health.phase} for {health.since_s:.0f} s"
        except Unavailable as error:
            wrong = str(error)
        if wrong is not None and before is not None:
            return wrong


async def _wait_for_shard(client: ShardClient, path: str) -> ShardInfo:
    loop = asyncio.get_running_loop()
    remind_at = loop.time() + SHARD_REMINDER_S
    logger.debug("Waiting for the shard at %s", path)
    while True:
        try:
            return await client.info()
        except Unavailable as error:
            if loop.time() >= remind_at:
                logger.info("Waiting for the shard at %s: %s", path, error)
                remind_at = loop.time() + SHARD_REMINDER_S
        await asyncio.sleep(SHARD_RETRY_S)


def check(config: RouterConfig, info: ShardInfo, warm: WarmupResult) -> None:
    """What only warm-up can tell, in TGI's words. Raises StartupError."""
    wrong = None
    if config.max_total_tokens is not None and warm.max_batch_total_tokens < config.max_total_tokens:
        wrong = f"Not enough memory to handle `max_total_tokens={config.max_total_tokens}`"
    elif warm.max_input_tokens >= warm.max_total_tokens:
        wrong = "`max_input_tokens` must be < `max_total_tokens`"
    elif warm.max_total_tokens > warm.max_batch_total_tokens:
        wrong = (
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: "
            f"{warm.max_total_tokens} and {warm.max_batch_total_tokens}"
        )
    elif not info.supports_chunking and config.max_batch_prefill_tokens < warm.max_input_tokens:
        wrong = (
            "`max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: "
            f"{config.max_batch_prefill_tokens} and {warm.max_input_tokens}"
        )
    if wrong is not None:
        raise StartupError(f"Argument validation error: {wrong}")


def caches_prefixes(config: RouterConfig, shard: ShardInfo) -> bool:
    """Only where the model can, whatever was asked for."""
    return shard.prefix_caching and config.prefix_caching is not False
