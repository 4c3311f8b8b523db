"""A shard that dies, hangs, falls silent, runs out of memory or is poisoned; a router that dies: nobody loses anything.

The server is broken while 32 streams run. What they say afterwards must be what they say when nothing happens.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import Measured
from tests.e2e.client import Answer, Client
from tests.e2e.failures import (
    LIKELY_S,
    ROUTER,
    SHARD,
    Faults,
    Switch,
    Trap,
    Undisturbed,
    all_running,
    broken_midway,
    fragile,
    kill,
)
from tests.e2e.servers import Whole, until
from tests.e2e.workload import Request, random_text
from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tokenizer import unpacked
from tgi.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.failures, pytest.mark.row("C: Supervision, exit codes, signals")]

STREAMS = 32
LENGTH = 240  # tokens
EARLY = 40  # tokens of each stream, about, when the server breaks
STEP_MS = 20  # so that the streams still run then
POISON = 333  # a token
GRAMMAR = {"type": "regex", "value": r"([A-Z][a-z]{2,5} ){30}[0-9]{4}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=29)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


class OneRankFaults(Faults):
    def __init__(self, directory: Path) -> None:
        self.slow = Switch(directory, "slow", ms=STEP_MS)
        self.memory = Switch(directory, "oom", min_rows=9)
        self.poison = Switch(directory, "kill", token=POISON)
        self.poisoned_step = Switch(directory, "raise", token=POISON)
        self.hang = Trap(directory, "hang", min_rows=8)
        self.cut = Trap(directory, "cut", min_rows=8)
        self.corrupt = Trap(directory, "corrupt", min_rows=8)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> OneRankFaults:
    return OneRankFaults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(model: Path, faults: OneRankFaults) -> Iterator[Whole]:
    with fragile(model, faults.specs) as server:
        yield server


def kinds_of_requests() -> list[Request]:
    """Greedy and seeded ones on both routes, one under a grammar."""
    rng = random.Random(4)
    greedy = {"max_new_tokens": LENGTH, "ignore_eos": True, "top_n_tokens": 2}
    sampled = {**greedy, "top_n_tokens": 5, "do_sample": True, "temperature": 0.9, "top_k": 5}
    requests = [Request("generate", random_text(rng, 30), True, greedy) for _ in range(STREAMS // 2)]
    requests += [
        Request("generate", random_text(rng, 30), True, {**sampled, "seed": rng.randrange(2**64)})
        for _ in range(STREAMS // 2 - 4)
    ]
    chat = {"max_tokens": LENGTH, "ignore_eos": True}
    requests.append(Request("chat", random_text(rng, 9), True, {**chat, "temperature": 0}))
    requests.append(Request("chat", random_text(rng, 9), True, {**chat, "temperature": 0.9, "top_k": 5, "seed": 11}))
    requests.append(
        Request("generate", "a date", True, {"max_new_tokens": LENGTH, "top_n_tokens": 5, "grammar": GRAMMAR})
    )
    return requests


def stopped_near(request: Request, answer: Answer) -> Request:
    """The same, with a stop string a few tokens behind where the server breaks."""
    for first in range(EARLY + 4, EARLY + 60):
        stop = "".join(answer.pieces[first : first + 3])
        if len(stop) > 2 and "�" not in stop and answer.text.find(stop) == len("".join(answer.pieces[:first])):
            return Request(request.route, request.text, True, {**request.parameters, "stop": [stop]})
    raise AssertionError("no place for a stop string")


@pytest.fixture(scope="module")
def undisturbed(server: Whole, tokenizer: Tokenizer) -> Undisturbed:
    async def run() -> Undisturbed:
        requests = kinds_of_requests()
        async with Client(server.url) as client:
            requests.append(stopped_near(requests[0], await requests[0].send(client)))
            assert len(requests) == STREAMS
            return await Undisturbed.measure(client, tokenizer, requests)

    return asyncio.run(run())


async def disturbed(
    server: Whole, faults: OneRankFaults, undisturbed: Undisturbed, what: str, disturb: Callable[[], Awaitable[None]]
) -> float:
    """Break the server in the midst of the streams. -> the longest pause of all of them, seconds."""
    gap_s = await broken_midway(server, faults, undisturbed, EARLY, what, disturb)
    async with Client(server.url) as client:  # and it goes on as if nothing had been
        again = await undisturbed.requests[0].send(client)
        assert again.told == undisturbed.answers[0].told
        assert await client.get("/health") == 200
        assert await client.metric("tgi_batch_current_size") == 0
        assert await client.metric("tgi_queue_size") == 0
    return gap_s


@pytest.mark.row("G: 7 One failing request")
def test_a_killed_shard(server: Whole, faults: OneRankFaults, undisturbed: Undisturbed, measured: Measured) -> None:
    victim = 0

    async def disturb() -> None:
        nonlocal victim
        victim = kill(server, SHARD)

    gap_s = asyncio.run(disturbed(server, faults, undisturbed, "kill -9", disturb))
    assert server.launcher.child(SHARD) != victim
    measured("shard killed, 32 streams: time until tokens flow again", gap_s, "s")
    assert gap_s < 5 * LIKELY_S


def test_a_hung_step(server: Whole, faults: OneRankFaults, undisturbed: Undisturbed, measured: Measured) -> None:
    async def disturb() -> None:
        faults.hang.spring()
        await until(lambda: faults.hang.has_sprung, "the step hangs")
        async with Client(server.url) as client:
            await until_status(client, "/health", 503)

    gap_s = asyncio.run(disturbed(server, faults, undisturbed, "hung step", disturb))
    assert "hung" in server.log
    measured("step hung (limit 2 s), 32 streams: time until tokens flow again", gap_s, "s")
    assert gap_s < 5 * LIKELY_S


def test_a_silent_shard(server: Whole, faults: OneRankFaults, undisturbed: Undisturbed, measured: Measured) -> None:
    """Stopped as a whole: even its health does not answer."""

    async def disturb() -> None:
        kill(server, SHARD, signal.SIGSTOP)

    gap_s = asyncio.run(disturbed(server, faults, undisturbed, "frozen shard", disturb))
    measured("shard frozen (limit 2 s), 32 streams: time until tokens flow again", gap_s, "s")
    assert gap_s < 5 * LIKELY_S


@pytest.mark.parametrize("fault", ["cut", "corrupt"])
def test_a_broken_stream(server: Whole, faults: OneRankFaults, undisturbed: Undisturbed, fault: str) -> None:
    """The connection between router and shard breaks, or what comes over it cannot be read: the shard lives on."""
    shard = server.launcher.child(SHARD)
    trap: Trap = getattr(faults, fault)

    async def disturb() -> None:
        trap.spring()
        await until(lambda: trap.has_sprung, "the stream breaks")

    asyncio.run(disturbed(server, faults, undisturbed, fault, disturb))
    assert server.launcher.child(SHARD) == shard


def test_no_memory_for_a_step(server: Whole, faults: OneRankFaults, undisturbed: Undisturbed) -> None:
    """No step of more than 8 rows has room: all run on in smaller steps, nobody fails, the shard lives on."""
    shard = server.launcher.child(SHARD)

    async def disturb() -> None:
        with faults.memory.on():
            async with Client(server.url) as client:
                answer = await client.generate("hello", True, max_new_tokens=8, ignore_eos=True)
                assert len(answer.ids) == 8

    asyncio.run(disturbed(server, faults, undisturbed, "out of memory", disturb))
    assert server.launcher.child(SHARD) == shard


@pytest.mark.parametrize("kind", ["poison", "poisoned_step"])
def test_a_poison(
    server: Whole, faults: OneRankFaults, undisturbed: Undisturbed, tokenizer: Tokenizer, measured: Measured, kind: str
) -> None:
    """One request kills the shard, or breaks the step, wherever it runs: it alone fails, with 424."""
    clean = undisturbed.without(POISON, 12)
    [text] = [tokenizer.token_text(POISON)]
    poison = {"inputs": f"hello {text} {text}", "parameters": {"max_new_tokens": 5}}
    assert POISON in unpacked(tokenizer.encode(f"hello {text} {text}").ids)
    switch: Switch = getattr(faults, kind)
    said: list[tuple[int, object]] = []

    async def disturb() -> None:
        with switch.on():
            async with Client(server.url) as client:
                said.append(await client.exchange("/generate", poison))

    gap_s = asyncio.run(disturbed(server, faults, clean, kind, disturb))
    [(status, body)] = said
    assert status == 424, body
    measured(f"{kind} among {len(clean.requests)} streams: longest pause of them", gap_s, "s")


async def until_status(client: Client, path: str, status: int) -> None:
    async with asyncio.timeout(5 * LIKELY_S):
        while True:
            if await client.get(path) == status:
                return
            await asyncio.sleep(0.01)


def test_a_killed_router(server: Whole, faults: OneRankFaults, undisturbed: Undisturbed, measured: Measured) -> None:
    """Clients see their connections end; the shard keeps its weights and serves the next router."""
    shard = server.launcher.child(SHARD)

    async def run() -> float:
        with faults.slow.on():
            async with Client(server.url) as client:
                tasks = [asyncio.create_task(request.send(client)) for request in undisturbed.requests]
                await all_running(client, len(tasks) * EARLY)
                kill(server, ROUTER)
                killed_at = time.monotonic()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, aiohttp.ClientError) for end in ends), ends
        serves_at = await first_answer(server, undisturbed)
        async with Client(server.url) as client:
            again = await asyncio.gather(*(request.send(client) for request in undisturbed.requests))
        undisturbed.assert_same(again, "after the router was killed")
        return serves_at - killed_at

    seconds = asyncio.run(run())
    assert server.launcher.child(SHARD) == shard
    measured("router killed: time until the next one has answered a request", seconds, "s")
    assert seconds < 5 * 3


async def first_answer(server: Whole, undisturbed: Undisturbed) -> float:
    """When a request has been answered again."""
    async with asyncio.timeout(60), Client(server.url) as client:
        while True:
            try:
                await client.generate("hello", max_new_tokens=1)
                return time.monotonic()
            except (aiohttp.ClientError, AssertionError):
                await asyncio.sleep(0.01)


def test_what_dies_again_and_again(model: Path, tmp_path: Path) -> None:
    """Five restarts without a finished request are enough: the server ends and says why."""
    with fragile(model, ["exit:every=1"]) as server:

        async def run() -> list[int]:
            async with Client(server.url) as client:
                seen: list[int] = []
                while server.launcher.popen.poll() is None:
                    try:
                        seen.append(await client.status("/generate", {"inputs": "hello"}))
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.05)
                return seen

        statuses = asyncio.run(run())
        assert server.launcher.wait() == 1, server.log
        assert set(statuses) <= {424, 503}, statuses
        assert "restarts" in server.launcher.lines[-1], server.log
