"""What operators do and see while a shard is started again: probes, a stop, one death after the other."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import Measured
from tests.e2e.client import Client
from tests.e2e.failures import LIKELY_S, ROUTER, SHARD, Switch, all_running, fragile, kill
from tests.e2e.servers import Whole, until, wait_until
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.failures, pytest.mark.row("C: Supervision, exit codes, signals")]

DEATHS = 6  # more than the limit of those between which nothing finishes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=41)


def parameters(length: int) -> dict[str, object]:
    return {"max_new_tokens": length, "ignore_eos": True}


async def until_health(client: Client, status: int) -> None:
    async with asyncio.timeout(5 * LIKELY_S):
        while True:
            if await client.get("/health") == status:
                return
            await asyncio.sleep(0.005)


@pytest.mark.fault("TGI#2593", "sglang#4191")
def test_one_death_after_the_other_is_no_crash_loop_while_requests_finish(model: Path, measured: Measured) -> None:
    """Each shard is killed as soon as it has answered once. The probe says 503 from each death until it is back."""
    with fragile(model, []) as server:

        async def run() -> float:
            slowest_s = 0.0
            async with Client(server.url) as client:
                for _ in range(DEATHS):
                    assert await client.get("/health") == 200
                    kill(server, SHARD)
                    killed_at = time.monotonic()
                    await until_health(client, 503)
                    slowest_s = max(slowest_s, time.monotonic() - killed_at)
                    answer = await client.generate("hello", max_new_tokens=3, ignore_eos=True)
                    assert len(answer.ids) == 3
                    await until_health(client, 200)
            return slowest_s

        seconds = asyncio.run(run())
        measured("shard killed: longest time until /health said 503", seconds, "s")
        assert server.log.count("ShardFailed") == DEATHS
        assert "given up" not in server.log


@pytest.mark.fault("TGI#2035")
def test_a_stop_while_the_shard_starts_again(model: Path, tmp_path: Path) -> None:
    """Who waits for it is told, at once; the server ends as after any stop."""
    slow = Switch(tmp_path, "slow", ms=20)
    with fragile(model, [slow.spec]) as server, slow.on():

        async def run() -> None:
            async with Client(server.url) as client:
                streams = [asyncio.create_task(stream(client)) for _ in range(4)]
                body = {"inputs": "hello", "parameters": parameters(500)}
                plain = asyncio.create_task(client.exchange("/generate", body))
                await all_running(client, 20)
                kill(server, SHARD)
                await until(lambda: "Starting the shards again" in server.log, "the launcher has seen the death")
                late = asyncio.create_task(client.exchange("/generate", body))
                await until_health(client, 503)
                server.launcher.popen.send_signal(signal.SIGTERM)
                for last in await asyncio.gather(*streams):
                    assert last["error_type"] == "unavailable", last
                for status, answer in (await plain, await late):
                    assert (status, answer["error_type"]) == (503, "unavailable"), answer

        asyncio.run(run())
        assert server.launcher.wait(5 * LIKELY_S) == 0, server.log
        assert "SIGTERM received: stopping" in server.log
        assert "Traceback" not in server.log


async def stream(client: Client) -> dict[str, object]:
    """-> the last event"""
    body = {"inputs": "hello", "parameters": parameters(500)}
    events = [event async for event in client.events("/generate_stream", body)]
    return json.loads(events[-1])


def test_router_and_shard_killed_together(model: Path, measured: Measured) -> None:
    """One restart is counted; the server answers again."""
    with fragile(model, []) as server:
        kill(server, SHARD)
        kill(server, ROUTER)
        killed_at = time.monotonic()
        asyncio.run(answered(server))
        measured("shard and router killed: time until a request is answered", time.monotonic() - killed_at, "s")
        wait_until(lambda: server.log.count("Shard ready in") == 2, "the shard is ready again")
        assert "(restart 2 of 5" not in server.log


async def answered(server: Whole) -> None:
    async with asyncio.timeout(60), Client(server.url) as client:
        while True:
            try:
                if await client.status("/generate", {"inputs": "hello", "parameters": parameters(2)}) == 200:
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.01)
