"""GET /metrics, and what of it is only read when somebody looks: the scheduler's own numbers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from tgi.observability.exposition import CONTENT_TYPE, render
from tgi.observability.metrics import Metrics
from tgi.router.api.services import services_of
from tgi.router.scheduling.stats import SchedulerStats

_PLAIN = {  # counter -> its field of SchedulerStats
    "tgi_prefix_prompt_tokens": "prompt_tokens",
    "tgi_prefix_hit_tokens": "cached_tokens",
    "tgi_prefix_evicted_blocks": "evicted_blocks",
    "tgi_prefix_offloaded_blocks": "offloaded_blocks",
    "tgi_prefix_returned_blocks": "returned_blocks",
    "tgi_batch_preemptions": "preemptions",
    "tgi_shard_reconnects": "reconnects",
    "tgi_shard_restarts": "restarts",
}


async def metrics(request: Request) -> Response:
    services = services_of(request)
    services.refresh_metrics()
    body = await asyncio.to_thread(render, services.metrics.registry)
    return Response(body, headers={"content-type": CONTENT_TYPE})


def follow(stats: SchedulerStats, metrics: Metrics, block_size: int, num_blocks: int) -> Callable[[], None]:
    """Let the scheduler feed its histograms, and return what brings gauges and counters up to date.

    `num_blocks` counts block 0, which holds no tokens.
    """
    labelled = {
        "tgi_batch_inference_count": stats.inference_count,
        "tgi_batch_inference_success": stats.inference_success,
        "tgi_batch_inference_failure": stats.inference_failure,
        "tgi_batch_concat": stats.concat,
    }
    told: Counter[tuple[str, str | None]] = Counter()

    def tell(name: str, label: str | None, count: int) -> None:
        metrics.count(name, label, count - told[name, label])
        told[name, label] = count

    def refresh() -> None:
        metrics.set("tgi_queue_size", stats.queue_size)
        metrics.set("tgi_batch_current_size", stats.batch_current_size)
        metrics.set("tgi_batch_current_max_tokens", stats.batch_current_max_tokens)
        used = stats.blocks_live + stats.blocks_cached
        metrics.set("tgi_batch_max_total_tokens", (used + stats.blocks_free) * block_size)
        metrics.set("tgi_batch_total_tokens", used * block_size)
        metrics.set("tgi_kv_blocks", stats.blocks_live, "live")
        metrics.set("tgi_kv_blocks", stats.blocks_cached, "cached")
        metrics.set("tgi_kv_blocks", stats.blocks_free, "free")
        tell("tgi_shard_suspects", "cleared", stats.suspects_cleared)
        tell("tgi_shard_suspects", "failed", stats.suspects_failed)
        metrics.set("tgi_host_blocks", stats.blocks_host)
        for name, attribute in _PLAIN.items():
            tell(name, None, getattr(stats, attribute))
        for name, counter in labelled.items():
            for label, count in counter.items():
                tell(name, label, count)

    stats.observe = metrics.observe
    stats.blocks_free = stats.blocks_free or num_blocks - 1  # nothing is used before the first step
    return refresh
