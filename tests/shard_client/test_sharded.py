"""Waiting for the shard: no socket, a stale socket, a failed shard, a stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from tests.fakes.shard import ScriptedShard
from tgi.enums import Phase
from tgi.errors import Unavailable
from tgi.shard_client.messages import Health
from tgi.shard_client.sharded import connect_when_ready


@pytest.fixture
def uds(tmp_path: Path) -> str:
    return str(tmp_path / "shard-0")


def test_it_waits_until_the_shard_is_there(uds: str) -> None:
    shard = ScriptedShard(uds)
    asked = threading.Event()

    def should_stop() -> bool:
        asked.set()
        return False

    async def connect() -> None:
        starting = asyncio.create_task(asyncio.to_thread(lambda: (asked.wait(), shard.start())))
        client = await connect_when_ready(uds, 30, should_stop)
        assert (await client.info()).vocab_size > 0
        await starting
        await client.close()

    asyncio.run(connect())
    shard.stop()


def test_a_socket_that_nobody_serves_is_not_ready(uds: str) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(uds)
    with pytest.raises(Unavailable, match=r"not ready within 0\.2 s: .*cannot be reached"):
        asyncio.run(connect_when_ready(uds, 0.2))


def test_the_deadline_names_what_is_missing(uds: str) -> None:
    with pytest.raises(Unavailable, match="socket does not exist"):
        asyncio.run(connect_when_ready(uds, 0.0))


def test_it_can_be_told_to_stop(uds: str) -> None:
    answers = iter([False, True])
    with pytest.raises(Unavailable, match="stopped"):
        asyncio.run(connect_when_ready(uds, 30, lambda: next(answers)))


def test_a_shard_that_has_failed_is_not_waited_for(uds: str) -> None:
    with ScriptedShard(uds) as shard:
        shard.health_answer = Health(Phase.FAILED, 0, 0.0, 0.0)
        with pytest.raises(Unavailable, match="has failed"):
            asyncio.run(connect_when_ready(uds, 30))
