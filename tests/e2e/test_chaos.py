"""Everything at once for a while: random requests, hang-ups, overload, bad input, and a shard that is killed now and
then. Afterwards nothing is left of it, and every answer is the one that its request has alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Measured
from tests.e2e.client import Answer, Client, Refused
from tests.e2e.servers import LocalRouter, Process, local_router, shard_command
from tests.e2e.workload import Comparison, Request, assert_whole, at_once, random_requests
from tests.fakes.tiny_model import write_tiny_llama
from tgi.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.failures, pytest.mark.row("G: 7 One failing request")]

CALLERS = 40
MOST_AT_ONCE = 32  # so that some are refused
POOL = 9 * 64  # KV tokens; far less than the callers would like
KINDS = 60  # of requests
REST_S = 0.5  # before what is left is counted
MOST_GROWTH_MIB = 24.0

BAD_INPUT: tuple[tuple[str, Any, int], ...] = (
    ("/generate", {"inputs": ""}, 422),
    ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 0}}, 422),
    ("/generate", {"inputs": "x", "parameters": {"temperature": -1}}, 422),
    ("/generate", {"inputs": "x " * 3000, "parameters": {"max_new_tokens": 5}}, 422),
    ("/generate", {"inputs": 7}, 422),
    ("/generate", {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "("}}}, 422),
    ("/v1/chat/completions", {"messages": "hello"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999999": 1}}, 400),
    ("/v1/nothing", {}, 404),
)


class Shards:
    """One shard after another at the same socket, as a launcher would start them."""

    def __init__(self, model: Path, prefix: Path) -> None:
        self.path = f"{prefix}-0"
        self._command = shard_command(model, "--dtype", "float32", "--uds-path", str(prefix))
        self._process = Process(self._command)
        self._process.wait_for("Server started at")
        self.kills = 0

    def kill(self) -> None:
        self._process.popen.send_signal(signal.SIGKILL)
        self._process.popen.wait()
        self._process.kill()
        self._process = Process(self._command)
        self.kills += 1

    def stop(self) -> None:
        try:
            assert self._process.stop() == 0, self._process.log
        finally:
            self._process.kill()


@dataclass
class Outcome:
    answered: Counter[int] = field(default_factory=Counter)  # by kind of request
    hung_up: int = 0
    refused: Counter[int] = field(default_factory=Counter)


@dataclass
class Chaos:
    """Callers that send whatever comes to their minds until the time is over."""

    client: Client
    requests: Sequence[Request]
    alone: Sequence[Answer]  # what each says when nothing else happens
    comparison: Comparison
    until: float  # time.monotonic()
    outcome: Outcome = field(default_factory=Outcome)

    async def caller(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.until:
            what = rng.random()
            if what < 0.1:
                await self._bad(rng)
            elif what < 0.3:
                await self._hang_up(rng)
            else:
                await self._ask(rng)

    async def _ask(self, rng: random.Random) -> None:
        kind = rng.randrange(len(self.requests))
        request = self.requests[kind]
        try:
            answer = await request.send(self.client)
        except Refused as refused:
            if refused.status != 429:
                raise
            self.outcome.refused[429] += 1
            await asyncio.sleep(rng.random() * 0.2)
            return
        assert_whole(answer, request)
        self.comparison.compare(answer, self.alone[kind], request)
        self.outcome.answered[kind] += 1

    async def _hang_up(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)
        with contextlib.suppress(TimeoutError, Refused):
            async with asyncio.timeout(rng.random() * 0.3):
                await request.send(self.client)
        self.outcome.hung_up += 1

    async def _bad(self, rng: random.Random) -> None:
        path, body, expected = rng.choice(BAD_INPUT)
        async with asyncio.timeout(60):
            status = await self.client.status(path, body)
        assert status in (expected, 429), (path, body, status)
        self.outcome.refused[status] += 1


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of this process, which is the router (and the callers)."""

    tasks: int
    descriptors: int
    mib: float

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
        return cls(len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), int(resident.split()[1]) / 1024)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=31)


@pytest.fixture(scope="module")
def shards(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    shards = Shards(model, tmp_path_factory.mktemp("s") / "s")
    try:
        yield shards
    finally:
        shards.stop()


@pytest.fixture(scope="module")
def router(model: Path, shards: Shards) -> Iterator[LocalRouter]:
    options: dict[str, Any] = {
        "max_batch_total_tokens": POOL,
        "max_total_tokens": 512,
        "max_concurrent_requests": MOST_AT_ONCE,
    }
    with local_router(model, shards.path, **options) as router:
        yield router


async def survive(
    router: LocalRouter, shards: Shards, model: Path, seconds: float, kill_every_s: float, measured: Measured
) -> None:
    requests = random_requests(KINDS, seed=99, longest_prompt=20, longest_answer=280)
    comparison = Comparison(load_tokenizer(model))
    async with Client(router.url) as client:
        alone = await at_once(1, [lambda r=request: r.send(client) for request in requests])
        # Once before, so that all is warm and the allocators have what they will need.
        await riot(Chaos(client, requests, alone, comparison, time.monotonic() + seconds / 4), shards, seconds)
    await router.idle()
    await asyncio.sleep(REST_S)
    before, kills, stats = Footprint.now(), shards.kills, router.core.stats
    async with Client(router.url) as client:
        chaos = Chaos(client, requests, alone, comparison, time.monotonic() + seconds)
        await riot(chaos, shards, kill_every_s)
        await router.idle()
        assert await client.get("/health") == 200
        assert await client.metric("tgi_batch_current_size") == 0
        assert await client.metric("tgi_queue_size") == 0
    await asyncio.sleep(REST_S)
    after, outcome, kills = Footprint.now(), chaos.outcome, shards.kills - kills
    answered = outcome.answered.total()
    comparison.report(
        f"{answered} answered, {outcome.hung_up} hung up, {dict(outcome.refused)} refused, {kills} kills, "
        f"{stats.preemptions} preemptions; {before} -> {after}"
    )
    assert kills >= 2
    assert len(outcome.answered) == KINDS, "too few answers to mean anything"
    assert outcome.hung_up
    assert outcome.refused[429]
    assert outcome.refused[422]
    assert stats.preemptions, "the pool was too large"
    assert (after.tasks, after.descriptors) == (before.tasks, before.descriptors)
    measured(f"{seconds:g} s of chaos, {kills} kills: requests answered", answered, "requests")
    measured(f"{seconds:g} s of chaos: the router's memory has grown by", after.mib - before.mib, "MiB")
    assert after.mib - before.mib < MOST_GROWTH_MIB


async def riot(chaos: Chaos, shards: Shards, kill_every_s: float) -> None:
    async def killer() -> None:
        while True:
            await asyncio.sleep(kill_every_s)
            shards.kill()

    killing = asyncio.create_task(killer())
    try:
        async with asyncio.TaskGroup() as group:
            for seed in range(CALLERS):
                group.create_task(chaos.caller(seed))
    finally:
        killing.cancel()
        await asyncio.wait([killing])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_45_seconds_of_chaos(router: LocalRouter, shards: Shards, model: Path, measured: Measured) -> None:
    router.run(survive(router, shards, model, 45, 16, measured))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_minutes_of_chaos(router: LocalRouter, shards: Shards, model: Path, measured: Measured) -> None:
    router.run(survive(router, shards, model, 600, 60, measured), timeout_s=1700)
