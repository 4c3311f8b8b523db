"""Joining a shard that is slow, frozen, or another one than before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tgi.enums import Phase
from tgi.errors import StartupError, Unavailable
from tgi.router import warm_up as room
from tgi.router.cli import read_config
from tgi.router.warm_up import warm_up, warm_up_again
from tgi.shard_client import client as shard_client
from tgi.shard_client.client import ShardClient
from tgi.shard_client.messages import Health, ShardInfo, WarmupRequest, WarmupResult

INFO = ShardInfo("llama", "float32", "cpu", "cpu", 16, 300, True, True, 0, 1, 4096, False)
WARM = WarmupResult(3000, 4000, 8000, 500, 16, 128)
WELL = Health(Phase.COMPILING, 0, 100.0, 1800.0)
HUNG = Health(Phase.COMPILING, 0, 1801.0, 1800.0)
CONFIG = read_config({}, {})


class Shard:
    """Answers as a list says: a Health, or None for silence; the last one again and again."""

    uds_path = "/nowhere"

    def __init__(self, *answers: Health | None, info: ShardInfo = INFO) -> None:
        self._info = info
        self._answers = list(answers)
        self.num_asked = 0
        self.warm = asyncio.Event()
        self.has_been_asked_often = asyncio.Event()
        self.was_cancelled = False

    async def info(self) -> ShardInfo:
        return self._info

    async def health(self, timeout_s: float) -> Health:
        self.num_asked += 1
        if self.num_asked > 50:
            self.has_been_asked_often.set()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise Unavailable("no answer in time")
        return answer

    async def warmup(self, request: WarmupRequest) -> WarmupResult:
        try:
            await self.warm.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return WARM


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WATCH_S", 0.0)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


def test_a_warm_up_takes_as_long_as_the_shard_is_well() -> None:
    async def main() -> None:
        shard = Shard(WELL, None, WELL, HUNG, WELL)  # one bad answer by itself means nothing
        warming = asyncio.create_task(warm_up(shard, CONFIG))  # pyright: ignore[reportArgumentType]
        await shard.has_been_asked_often.wait()
        assert not warming.done()
        shard.warm.set()
        assert await warming == (INFO, WARM)

    run(main)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([WELL, None], "no answer in time"),
        ([WELL, HUNG], "it has been compiling for 1801 s"),
        ([Health(Phase.FAILED, 0, 0.0, 0.0)], "it has been failed for 0 s"),
    ],
)
def test_a_shard_that_is_frozen_in_its_warm_up_is_given_up(answers: list[Health | None], told: str) -> None:
    async def main() -> None:
        shard = Shard(*answers)
        with pytest.raises(Unavailable, match=f"does not come back from its warm-up: {told}"):
            await warm_up_again(shard, CONFIG, INFO)  # pyright: ignore[reportArgumentType]
        assert shard.was_cancelled

    run(main)


@pytest.mark.parametrize("change", [{"model_type": "qwen2"}, {"vocab_size": 301}, {"speculate": 2}])
def test_another_model_cannot_take_over(change: dict[str, Any]) -> None:
    """What was tokenised and checked for the one means nothing to the other."""

    async def main() -> None:
        shard = Shard(WELL, info=replace(INFO, **change))
        with pytest.raises(StartupError, match=r"another model: .*restart the router too"):
            await warm_up_again(shard, CONFIG, INFO)  # pyright: ignore[reportArgumentType]

    run(main)


def test_the_same_model_on_another_device_can() -> None:
    async def main() -> None:
        shard = Shard(WELL, info=replace(INFO, attention="flashinfer", device_type="cuda", world_size=2))
        shard.warm.set()
        assert await warm_up_again(shard, CONFIG, INFO) == WARM  # pyright: ignore[reportArgumentType]

    run(main)


def test_a_frozen_shard_is_not_waited_for_at_the_first_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket takes connections; nobody reads them."""
    monkeypatch.setattr(shard_client, "INFO_TIMEOUT_S", 0.05)

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as frozen:
            frozen.bind(str(tmp_path / "s"))
            frozen.listen()
            client = ShardClient.connect(str(tmp_path / "s"))
            with pytest.raises(Unavailable, match="did not answer in time"):
                await client.info()
            await client.close()

    run(main)


@pytest.mark.parametrize(
    ("asked", "why"),
    [(True, "this model shares none: leave it out$"), (False, "prefix caching is off: .*, or set PREFIX_CACHING=1$")],
)
def test_why_no_prefixes_go_to_the_host_is_said(asked: bool, why: str) -> None:
    config = replace(CONFIG, host_cache_bytes=1 << 20, prefix_caching=asked)

    async def main() -> None:
        with pytest.raises(StartupError, match=f"`host_cache_bytes` is for cached prefixes, but {why}"):
            await warm_up(Shard(WELL, info=replace(INFO, prefix_caching=False)), config)  # pyright: ignore[reportArgumentType]

    run(main)
