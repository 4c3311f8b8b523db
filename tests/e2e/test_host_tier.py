"""`--host-cache-bytes` on a whole server: chats that take turns in a pool too small for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.servers import LocalRouter, local_server
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
