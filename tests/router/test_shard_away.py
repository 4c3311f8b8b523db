"""The whole router while its shard is away: who waits hears that the server is there, and goes on afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.servers import LocalRouter, local_router, until
from tests.fakes.shard import Script, ScriptedShard
from tests.fakes.tokenizer import write_byte_tokenizer
from tgi.router import main
from tgi.router.api.sse import Pulse

CHAT = [{"role": "user", "content": "Hi"}]
STREAMS = {
    "native": ("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 40}}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 40, "stream": True}),
    "completions": ("/v1/completions", {"model": "tgi", "prompt": "Hi", "max_tokens": 40, "stream": True}),
    "responses": ("/v1/responses", {"model": "tgi", "input": "Hi", "max_output_tokens": 40, "stream": True}),
    "messages": ("/v1/messages", {"model": "tgi", "messages": CHAT, "max_tokens": 40, "stream": True}),
}
PLAIN = {"inputs": "plain", "parameters": {"max_new_tokens": 40}}


@dataclass
class Heard:
    """What came of one stream so far, line by line."""

    lines: list[str]

    @property
    def num_comments(self) -> int:
        return self.lines.count(":")

    @property
    def events(self) -> list[str]:
        return [line for line in self.lines if line.startswith("data: ")]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[ScriptedShard]:
    with ScriptedShard(tmp_path / "s-0", Script(window=4)) as shard:
        yield shard


@pytest.fixture
def router(tmp_path: Path, shard: ScriptedShard, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRouter]:
    monkeypatch.setattr(main, "Pulse", lambda *_: Pulse(keep_alive_s=0.05))
    model = write_byte_tokenizer(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with local_router(model, shard.uds_path) as router:
        yield router
        router.run(router.idle())


async def listen(session: aiohttp.ClientSession, path: str, body: Any, heard: Heard) -> None:
    async with session.post(path, json=body) as response:
        assert response.status == 200
        async for line in response.content:
            heard.lines.append(line.decode().rstrip("\n"))


async def leave(shard: ScriptedShard) -> None:
    await asyncio.to_thread(shard.kill)


async def come_back(shard: ScriptedShard) -> None:
    shard.let()
    await asyncio.to_thread(shard.start)


def test_streams_of_all_kinds_are_kept_alive_and_plain_answers_wait(router: LocalRouter, shard: ScriptedShard) -> None:
    async def undisturbed(session: aiohttp.ClientSession) -> dict[str, Heard]:
        heard = {name: Heard([]) for name in STREAMS}
        await asyncio.gather(*(listen(session, *STREAMS[name], heard[name]) for name in STREAMS))
        return heard

    async def run() -> None:
        async with aiohttp.ClientSession(router.url) as session:
            alone = await undisturbed(session)
            shard.hold()
            heard = {name: Heard([]) for name in STREAMS}
            async with asyncio.TaskGroup() as group:
                for name in STREAMS:
                    group.create_task(listen(session, *STREAMS[name], heard[name]))
                plain = group.create_task(session.post("/generate", json=PLAIN))
                await until(lambda: len(router.core.rows) == len(STREAMS) + 1, "all run")
                shard.let(10)
                await until(lambda: all(one.events for one in heard.values()), "all streams have begun")
                await leave(shard)
                before = {name: one.num_comments for name, one in heard.items()}
                await until(
                    lambda: all(one.num_comments > before[name] + 2 for name, one in heard.items()), "comments flow"
                )
                assert await status(session, "/health") == 503
                assert not plain.done()
                await come_back(shard)
            response = plain.result()
            assert response.status == 200
            assert len((await response.json())["generated_text"]) == 40
            assert await status(session, "/health") == 200
            for name in STREAMS:
                assert texts(heard[name]) == texts(alone[name]), name

    router.run(run())
    shard.assert_rules_kept()


async def status(session: aiohttp.ClientSession, path: str) -> int:
    async with session.get(path) as response:
        return response.status


def texts(heard: Heard) -> list[str]:
    """All text that the events carry, whatever they are called; ids and times differ from run to run."""
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if key in ("text", "content", "delta", "generated_text") and isinstance(part, str):
                    found.append(part)
                else:
                    collect(part)
        elif isinstance(value, list):
            for part in value:
                collect(part)

    for event in heard.events:
        payload = event.removeprefix("data: ")
        if payload != "[DONE]":
            collect(json.loads(payload))
    assert found
    return found


@pytest.mark.parametrize("name", [*STREAMS, "plain"])
def test_a_client_that_leaves_meanwhile_leaves_nothing(router: LocalRouter, shard: ScriptedShard, name: str) -> None:
    path, body = STREAMS.get(name, ("/generate", PLAIN))

    async def run() -> None:
        async with aiohttp.ClientSession(router.url) as session:
            shard.hold()
            asking = asyncio.create_task(session.post(path, json=body))
            await until(lambda: router.core.rows, "it runs")
            await leave(shard)
            await until(lambda: len(router.core.queue) == 1, "it waits")
            asking.cancel()
            await until(lambda: not router.core.queue, "its place is free")
            await come_back(shard)

    router.run(run())


def test_a_shard_with_less_room_changes_what_may_be_asked_for(router: LocalRouter, shard: ScriptedShard) -> None:
    """Who runs and wants more than there is now fails, clearly; so does who asks for it now."""
    long = {"inputs": "long", "parameters": {"max_new_tokens": 600}}

    async def run() -> None:
        async with aiohttp.ClientSession(router.url) as session:
            shard.hold()
            async with asyncio.TaskGroup() as group:
                too_long = group.create_task(session.post("/generate", json=long))
                short = group.create_task(session.post("/generate", json=PLAIN))
                await until(lambda: len(router.core.rows) == 2, "both run")
                await leave(shard)
                shard.script.max_position = 300
                await come_back(shard)
            assert too_long.result().status == 424
            assert "less" in (await too_long.result().json())["error"]
            assert short.result().status == 200
            async with session.post("/generate", json=long) as response:
                assert response.status == 422
                assert "must be <= 300" in (await response.json())["error"]
            async with session.get("/info") as response:
                assert (await response.json())["max_total_tokens"] == 300

    router.run(run())
