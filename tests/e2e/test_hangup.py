"""A client that hangs up frees its row and its blocks at once, wherever its request is; nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.servers import LocalRouter, local_server, until
from tests.fakes.tiny_model import write_tiny_llama
from tgi.router.scheduling.entry import Entry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.row("D: Finished and disconnected requests leave", "G: 4 a disconnect"),
]

ROWS = 3
LONG_PROMPT = "1 2 3 " * 800  # thousands of tokens, read 64 at a time
MOST_S = 5.0  # until a hang-up has its effect; a step takes milliseconds


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRouter]:
    model: Path = write_tiny_llama(tmp_path_factory.mktemp("model"), seed=9, max_position=8192)
    with local_server(model, max_batch_size=ROWS, max_batch_prefill_tokens=64) as router:
        yield router


class Caller:
    """A client on a bare connection, that can hang up at any byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def call(cls, router: LocalRouter, path: str, inputs: str, **parameters: Any) -> Caller:
        host, port = router.url.removeprefix("http://").split(":")
        caller = cls(*await asyncio.open_connection(host, int(port)))
        data = json.dumps({"inputs": inputs, "parameters": {"ignore_eos": True, **parameters}}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        caller.writer.write(head.encode() + b"\r\n" + data)
        await caller.writer.drain()
        return caller

    async def hang_up(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def rows(router: LocalRouter) -> list[Entry]:
    return list(router.core.rows)


async def freed(router: LocalRouter, num_rows: int, num_waiting: int = 0) -> None:
    """Wait for the effect of a hang-up, and see that the accounts are right at that moment."""
    core = router.core
    await until(
        lambda: (len(core.rows), len(core.queue)) == (num_rows, num_waiting),
        f"{num_rows} rows and {num_waiting} waiting",
        MOST_S,
    )
    router.check()


async def sibling(client: Client) -> Answer:
    return await client.generate("hello world", max_new_tokens=1500, temperature=0.8, seed=3, ignore_eos=True)


def with_siblings(router: LocalRouter, body: Callable[[], Any]) -> None:
    """Run `body` while two others generate; their answers must not change."""

    async def run() -> None:
        async with Client(router.url) as client:
            expected = await sibling(client)
            dropped = router.core.stats.dropped
            async with asyncio.TaskGroup() as group:
                siblings = [group.create_task(sibling(client)) for _ in range(ROWS - 1)]
                await until(lambda: [e.decoding for e in rows(router)] == [True] * (ROWS - 1), "the siblings run")
                await body()
                assert not any(task.done() for task in siblings), "the siblings ended too soon to tell anything"
                assert len(router.core.rows) == ROWS - 1
            assert [task.result().told for task in siblings] == [expected.told] * len(siblings)
            assert router.core.stats.dropped == dropped + 1
            assert await client.metric('tgi_request_failure{err="dropped"}') == router.core.stats.dropped
            await router.idle()

    router.run(run())


@pytest.mark.parametrize("path", ["/generate_stream", "/generate"])
def test_while_decoding(router: LocalRouter, path: str) -> None:
    async def body() -> None:
        caller = await Caller.call(router, path, "the capital", max_new_tokens=4000)
        await until(lambda: len(rows(router)) == ROWS and rows(router)[-1].generated, "it generates")
        if path == "/generate_stream":
            await caller.reader.readuntil(b'"index":1')
        await caller.hang_up()
        await freed(router, ROWS - 1)

    with_siblings(router, body)


@pytest.mark.parametrize("path", ["/generate_stream", "/generate"])
def test_while_its_prompt_is_read(router: LocalRouter, path: str) -> None:
    async def body() -> None:
        caller = await Caller.call(router, path, LONG_PROMPT, max_new_tokens=10)
        await until(lambda: len(rows(router)) == ROWS, "it runs")
        entry = rows(router)[-1]
        await until(lambda: entry.computed_len, "a part of its prompt is read")
        held = entry.allocation
        assert held is not None
        before = router.core.allocator.num_available
        await caller.hang_up()
        await freed(router, ROWS - 1)
        assert not entry.decoding, "its prompt was read to the end before it hung up"
        assert router.core.allocator.num_available >= before + held.num_blocks - 2 * (ROWS - 1)

    with_siblings(router, body)


@pytest.mark.parametrize("path", ["/generate_stream", "/generate"])
def test_while_queued(router: LocalRouter, path: str) -> None:
    async def run() -> None:
        runners = [await Caller.call(router, path, "hello", max_new_tokens=4000) for _ in range(ROWS)]
        await until(lambda: len(router.core.rows) == ROWS, "all rows are taken")
        first = await Caller.call(router, path, "one", max_new_tokens=10)
        second = await Caller.call(router, path, "two", max_new_tokens=4000)
        await until(lambda: len(router.core.queue) == 2, "two wait")
        await first.hang_up()
        await freed(router, ROWS, num_waiting=1)
        # The row of one that hangs up is the next one's.
        await runners[0].hang_up()
        await freed(router, ROWS)
        await until(
            lambda: rows(router)[-1].request.stopping.max_new_tokens == 4000 and rows(router)[-1].generated,
            "the second one generates",
        )
        for caller in (*runners[1:], second):
            await caller.hang_up()
        await router.idle(MOST_S)

    router.run(run())


@pytest.mark.fault("vllm#14326")
@pytest.mark.parametrize("inputs", ["the capital", LONG_PROMPT], ids=["decoding", "waiting for the prompt"])
def test_with_several_answers(router: LocalRouter, inputs: str) -> None:
    async def run() -> None:
        core = router.core
        caller = await Caller.call(router, "/generate", inputs, max_new_tokens=1000, best_of=2, temperature=0.8)
        if inputs is LONG_PROMPT:
            await until(lambda: [e.computed_len > 0 for e in rows(router)] == [True], "a part of the prompt is read")
            assert len(core.queue) == 1, "the other waits for it"
        else:
            await until(lambda: [bool(e.generated) for e in rows(router)] == [True, True], "both generate")
        await caller.hang_up()
        await freed(router, 0)
        assert core.allocator.num_available == core.allocator.num_blocks - 1
        await router.idle(MOST_S)

    router.run(run())
