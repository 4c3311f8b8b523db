"""`--host-cache-bytes` on a whole server: chats that take turns in a pool too small for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.process import free_port
from tests.e2e.client import Answer, Client
from tests.e2e.servers import START_S, LocalRouter, launch_command, local_server, running
from tests.e2e.workload import Request
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

POOL = 20 * 64  # blocks of 64: for two of the prompts
PROMPTS = [Request("generate", name * 400, False, {"max_new_tokens": 8, "ignore_eos": True}) for name in "abcd"]


def answers(router: LocalRouter, rounds: int) -> list[list[Answer]]:
    async def run() -> list[list[Answer]]:
        async with Client(router.url) as client:
            return [[await request.send(client) for request in PROMPTS] for _ in range(rounds)]

    return router.run(run())


def test_prefixes_come_back_from_the_host(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", seed=7)
    with local_server(model, host_cache_bytes=64 << 20, max_batch_total_tokens=POOL, max_total_tokens=512) as router:
        first, *later = answers(router, 3)
        stats = router.core.stats
        assert stats.offloaded_blocks > 0
        assert stats.returned_blocks > 0
        assert stats.cached_tokens >= 2 * 4 * 384, "every prompt but for its last block, each time but the first"
        assert stats.blocks_host > 0
    assert all([answer.told for answer in again] == [answer.told for answer in first] for again in later)


def refused(model: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Why a whole server does not start with these."""
    with running(launch_command(free_port(), "--model-id", str(model), *arguments), environment) as launcher:
        assert launcher.wait(START_S) == 1, launcher.log
        return launcher.log


def test_more_memory_than_there_is_is_refused_with_the_numbers(tmp_path: Path) -> None:
    log = refused(write_tiny_llama(tmp_path / "tiny", seed=7), "--host-cache-bytes", str(1 << 50))
    assert re.search(rf"--host-cache-bytes {1 << 50} asks for {1 << 30} MiB of host memory, but \d+ MiB are free", log)


def test_less_than_a_block_is_refused(tmp_path: Path) -> None:
    log = refused(write_tiny_llama(tmp_path / "tiny", seed=7), "--host-cache-bytes", "10")
    assert re.search(r"--host-cache-bytes 10 does not hold a single block: 1 x \d+ bytes", log)


def test_without_a_prefix_cache_it_is_refused(tmp_path: Path) -> None:
    environment = {"PREFIX_CACHING": "0", "HOST_CACHE_BYTES": str(64 << 20)}
    log = refused(write_tiny_llama(tmp_path / "tiny", seed=7), environment=environment)
    assert "`host_cache_bytes` is for cached prefixes, but prefix caching is off: leave it out" in log
