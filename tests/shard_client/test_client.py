"""The client against a real server on a Unix socket: order, long messages, breaks and clean ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.fakes.shard import LOGPROB, Script, ScriptedShard, scripted_tokens
from tests.fakes.tokenizer import packed
from tgi.enums import EndReason
from tgi.errors import StartupError, Unavailable
from tgi.shard_client.client import ShardClient, ShardStream
from tgi.shard_client.messages import Admit, Command, Sampling, Step, Stopping, WarmupRequest

PROMPT = packed([5, 6, 7])


@pytest.fixture
def uds(tmp_path: Path) -> str:
    return str(tmp_path / "shard-0")


def run(uds: str, test: Callable[[ShardClient], Awaitable[None]]) -> None:
    async def with_client() -> None:
        client = ShardClient.connect(uds)
        try:
            await asyncio.wait_for(test(client), 30)
        finally:
            await client.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left running: {left}"

    asyncio.run(with_client())


def admit(handle: int, max_new: int = 4, prompt: bytes = PROMPT, blocks: int = 4) -> Admit:
    first = 1 + (handle - 1) * blocks
    return Admit(
        handle, prompt, b"", 0, packed(range(first, first + blocks)), Sampling(), Stopping(max_new, eos_ids=(2,))
    )


async def collect(stream: ShardStream, handles: set[int]) -> dict[int, list[int]]:
    """Read until all rows have ended, acknowledging every step."""
    ids: dict[int, list[int]] = {handle: [] for handle in handles}
    running = set(handles)
    async for step in stream:
        for index, handle in enumerate(step.handles):
            ids[handle].append(step.token_ids[index])
            assert step.logprobs[index] == LOGPROB
            if step.end_of(index) is not EndReason.RUNNING:
                running.discard(handle)
        stream.send(Command(seen=step.number))
        if not running:
            break
    return ids


def test_unary_calls(uds: str) -> None:
    async def calls(client: ShardClient) -> None:
        assert (await client.info()).block_size == 16
        warm = await client.warmup(WarmupRequest(max_batch_prefill_tokens=512, max_rows=8, max_total_tokens=100))
        assert (warm.max_input_tokens, warm.max_total_tokens, warm.max_rows) == (99, 100, 8)
        assert not (await client.health(1.0)).is_hung
        assert await client.service_discovery() == [f"unix://{uds}"]
        await client.clear_cache()
        with pytest.raises(StartupError, match="lower --max-batch-total-tokens"):
            await client.warmup(WarmupRequest(512, 8, max_batch_total_tokens=10**9))

    with ScriptedShard(uds):
        run(uds, calls)


def test_a_stream_begins_with_step_0_and_yields_what_was_asked(uds: str) -> None:
    async def stream_rows(client: ShardClient) -> None:
        stream = client.stream()
        first = await anext(stream)
        assert (first.number, first.opening is not None) == (0, True)
        stream.send(Command(admit=[admit(1), admit(2, max_new=3, prompt=packed([9]))]))
        ids = await collect(stream, {1, 2})
        assert ids == {1: scripted_tokens(PROMPT, 4), 2: scripted_tokens(packed([9]), 3)}

    with ScriptedShard(uds) as shard:
        run(uds, stream_rows)
        shard.assert_rules_kept()


def test_sending_keeps_the_order_and_copies_the_command(uds: str) -> None:
    async def send_many(client: ShardClient) -> None:
        stream = client.stream()
        await anext(stream)
        command = Command()
        for number in range(1, 500):
            command.cancel = [number]
            stream.send(command)
        stream.send(Command(admit=[admit(1, max_new=1)]))
        command.cancel.append(1)
        await collect(stream, {1})

    with ScriptedShard(uds) as shard:
        shard.keep_commands = True
        run(uds, send_many)
        assert [command.cancel for command in shard.commands[:499]] == [[number] for number in range(1, 500)]


@pytest.mark.fault("TGI#2018")
def test_messages_over_4_mib_pass_both_ways(uds: str) -> None:
    prompt = packed(range(2_000_000))  # 8 MB

    async def send_long(client: ShardClient) -> None:
        stream = client.stream()
        await anext(stream)
        request = admit(1, max_new=1, prompt=prompt, blocks=125_001)
        request = Admit(**{name: getattr(request, name) for name in request.__slots__} | {"prompt_logprobs": True})
        stream.send(Command(admit=[request]))
        step: Step = await anext(stream)
        assert len(step.prompt_logprobs[0].logprobs) == 2_000_000

    script = Script(num_blocks=200_000, check_memory=False, prefill_tokens=10**7)
    with ScriptedShard(uds, script):
        run(uds, send_long)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_stream_that_breaks_says_unavailable(uds: str, how: str) -> None:
    shard = ScriptedShard(uds).start()

    async def lose(client: ShardClient) -> None:
        stream = client.stream()
        await anext(stream)
        ending = threading.Thread(target=getattr(shard, how))
        ending.start()
        with pytest.raises(Unavailable):
            await anext(stream)
        await asyncio.to_thread(ending.join)
        stream.send(Command(seen=1))  # no one listens: not an error of the sender
        with pytest.raises(Unavailable):
            await anext(stream)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await client.info()

    run(uds, lose)


def test_a_shard_that_comes_back_is_reached_again_with_another_epoch(uds: str) -> None:
    shard = ScriptedShard(uds).start()

    async def come_back(client: ShardClient) -> None:
        before = await anext(client.stream())
        await asyncio.to_thread(shard.kill)
        await asyncio.to_thread(shard.start)
        while True:
            try:
                await client.health(1.0)
                break
            except Unavailable:
                await asyncio.sleep(0.01)
        after = await anext(client.stream())
        assert after.kv_epoch != before.kv_epoch

    run(uds, come_back)
    shard.stop()


def test_the_newest_stream_wins(uds: str) -> None:
    async def open_twice(client: ShardClient) -> None:
        old = client.stream()
        first = await anext(old)
        new = client.stream()
        second = await anext(new)
        assert second.kv_epoch == first.kv_epoch
        with pytest.raises(Unavailable, match="has ended the stream"):
            await anext(old)
        new.send(Command(admit=[admit(1, max_new=2)]))
        assert await collect(new, {1}) == {1: scripted_tokens(PROMPT, 2)}

    with ScriptedShard(uds):
        run(uds, open_twice)


def test_closing_ends_a_waiting_reader_cleanly(uds: str) -> None:
    async def close(client: ShardClient) -> None:
        stream = client.stream()
        await anext(stream)
        reader = asyncio.create_task(collect(stream, {1}))
        await asyncio.sleep(0)
        await stream.close()
        await stream.close()
        assert await reader == {1: []}
        stream.send(Command(seen=1))

    with ScriptedShard(uds) as shard:
        run(uds, close)
        assert shard.streams_opened == 1


def test_cancelling_the_reader_is_a_cancellation(uds: str) -> None:
    async def cancel(client: ShardClient) -> None:
        stream = client.stream()
        await anext(stream)
        reader = asyncio.create_task(collect(stream, {1}))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    with ScriptedShard(uds):
        run(uds, cancel)


def test_a_silent_shard_is_unavailable_in_time(uds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fakes import shard as fake

    release = threading.Event()

    def silent(self: object, request: object, context: object) -> object:
        release.wait()
        return fake.pb.HealthResponse()

    monkeypatch.setattr(fake._Service, "Health", silent)

    async def ask(client: ShardClient) -> None:
        with pytest.raises(Unavailable, match="did not answer in time"):
            await client.health(0.05)
        release.set()

    with ScriptedShard(uds):
        run(uds, ask)


@pytest.mark.fault("TGI#2593")
def test_without_a_shard_every_call_says_so(uds: str) -> None:
    async def ask(client: ShardClient) -> None:
        for call in (client.info, client.clear_cache, client.service_discovery):
            with pytest.raises(Unavailable, match=r"shard-0 cannot be reached"):
                await call()
        with pytest.raises(Unavailable):
            await anext(client.stream())

    run(uds, ask)
