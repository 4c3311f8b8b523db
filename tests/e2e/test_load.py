"""Random requests under memory pressure: all finish, each as if it were alone, and all memory comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.client import Client
from tests.e2e.servers import LocalRouter, local_server
from tests.e2e.workload import Comparison, assert_whole, at_once, random_requests, summary
from tests.fakes.tiny_model import write_tiny_llama
from tgi import hub
from tgi.text.tokenizer import Tokenizer, load_tokenizer

AT_ONCE = 32
HEALTH_DEADLINE_S = 60.0  # when none comes at all


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    pool: int  # KV tokens
    longest_prompt: int  # words
    longest_answer: int  # tokens
    seed: int = 20261129


# In blocks of 64 tokens: long requests take 4 to 7 of them each.
TINY = Load(requests=200, pool=12 * 64, longest_prompt=20, longest_answer=280)
REAL = Load(requests=200, pool=16 * 64, longest_prompt=60, longest_answer=240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def router(model: Path) -> Iterator[LocalRouter]:
    with local_server(model, max_batch_total_tokens=TINY.pool, max_total_tokens=512) as router:
        yield router


async def run_under_pressure(router: LocalRouter, load: Load, tokenizer: Tokenizer) -> Comparison:
    requests = random_requests(load.requests, load.seed, load.longest_prompt, load.longest_answer)
    stats = router.core.stats
    async with Client(router.url) as client:
        watch = asyncio.create_task(watch_health(client))
        together = await at_once(AT_ONCE, [lambda r=request: r.send(client) for request in requests])
        watch.cancel()
        await asyncio.wait([watch])
        assert watch.cancelled(), watch.exception()
        preemptions = stats.preemptions
        await router.idle()
        assert stats.dropped == 0
        assert await client.metric("tgi_queue_size") == 0
        assert await client.metric("tgi_batch_current_size") == 0
        assert await client.metric("tgi_request_success") == load.requests
        alone = await at_once(1, [lambda r=request: r.send(client) for request in requests])
    assert stats.preemptions == preemptions, "a request that runs alone gave way"
    comparison = Comparison(tokenizer)
    for request, found, expected in zip(requests, together, alone):
        assert_whole(found, request)
        comparison.compare(found, expected, request)
        for position in range(0, len(expected.top), 16):
            assert comparison.choice(expected, position, request)[0] == expected.ids[position], request
    cached = f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens cached"
    comparison.report(f"{summary(requests)}, {preemptions} preemptions, {cached}")
    assert preemptions > 0, "the pool was too large for this test to mean anything"
    assert stats.cached_tokens > 0
    return comparison


async def watch_health(client: Client) -> None:
    """Busy is not ill, and answers come however long the prompts are that are being read."""
    while True:
        assert await asyncio.wait_for(client.get("/health"), HEALTH_DEADLINE_S) == 200
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.fault("TGI#3043", "TGI#2192", "sglang#6888", "sglang#22511")
@pytest.mark.row("D: Continuous batching", "D: Radix prefix cache", "G: 3 the same seed")
def test_random_requests_under_memory_pressure(router: LocalRouter, model: Path) -> None:
    comparison = router.run(run_under_pressure(router, TINY, load_tokenizer(model)))
    assert comparison.excused == 0


@pytest.mark.soak
@pytest.mark.real_model
@pytest.mark.timeout(3600)
def test_random_requests_under_memory_pressure_with_the_real_model() -> None:
    with local_server(hub.BUNDLED_MODEL, max_batch_total_tokens=REAL.pool, max_total_tokens=1024) as router:
        router.run(run_under_pressure(router, REAL, load_tokenizer(hub.locate(hub.BUNDLED_MODEL))), timeout_s=3500)
