"""What a user of the bundled model sees that only a real model and a whole server can show."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from benchmarks.server_process import Server, serving
from tests.e2e.client import Answer, Client

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

STORY = "The lighthouse keeper wrote down the colour of the sea, and what the gulls had said of the weather. "


@pytest.mark.row("G: 5 a repeated long prompt is nearly free")
def test_a_repeated_prompt_comes_from_the_cache(bundled_server: Server) -> None:
    messages = [{"role": "user", "content": "Summarise this. " + STORY * 30}]

    async def ask_twice() -> None:
        async with Client(bundled_server.url) as client:
            cold = await client.chat(messages, max_tokens=12, temperature=0)
            hot = await client.chat(messages, max_tokens=12, temperature=0)
        assert cold.prompt_tokens > 500
        assert cold.cached_tokens < 64
        assert hot.cached_tokens >= hot.prompt_tokens - 128, "all but the last blocks"
        assert (hot.prompt_tokens, hot.finish) == (cold.prompt_tokens, cold.finish)

    asyncio.run(ask_twice())


@pytest.mark.fault("lmdeploy#1740")
@pytest.mark.row("D: Chunked prefill")
def test_a_stream_goes_on_while_a_long_prompt_is_read(bundled_server: Server) -> None:
    async def measure() -> int:
        """Events of a running stream between a long prompt's request and its first token."""
        async with Client(bundled_server.url) as client:
            short = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 500, "ignore_eos": True}}
            stream = client.events("/generate_stream", short)
            await anext(stream)
            long = asyncio.create_task(client.generate("A tale. " + STORY * 200, max_new_tokens=1))
            count = 0
            while not long.done():
                await anext(stream)
                count += 1
            await stream.aclose()
            assert long.result().ids
            return count

    assert asyncio.run(measure()) >= 4


@pytest.mark.fault("TGI#2985")
def test_thirty_chats_at_once_are_all_answered(bundled_server: Server) -> None:
    async def ask_all() -> None:
        async with Client(bundled_server.url) as client:
            asked = (
                client.chat([{"role": "user", "content": f"What is {number} + 1?"}], max_tokens=4, temperature=0)
                for number in range(30)
            )
            answers = await asyncio.gather(*asked)
        assert all(answer.text for answer in answers)

    asyncio.run(ask_all())


@pytest.mark.fault("TGI#375")
@pytest.mark.row("G: 10 TGI's start command works")
def test_a_start_command_of_tgi_serves_as_it_stands() -> None:
    """Flags as TGI's documentation combines them, some by their variables, and some that only a GPU needs."""
    command = "--model-id SmolLM2-135M-Instruct --num-shard 1 --max-input-tokens 512 --max-total-tokens 768"
    command += " --max-batch-prefill-tokens 1024 --max-concurrent-requests 16 --max-stop-sequences 6"
    command += " --waiting-served-ratio 1.2 --max-waiting-tokens 20 --max-best-of 3 --cuda-memory-fraction 0.9"
    command += " --cuda-graphs 1,2,4 --disable-custom-kernels --usage-stats off --json-output"
    variables = {"MAX_TOP_N_TOKENS": "7", "MAX_CLIENT_BATCH_SIZE": "3", "VALIDATION_WORKERS": "1"}
    with serving(command.split(), variables) as server:
        info = asyncio.run(fetch(f"{server.url}/info"))
        expected = {"max_input_tokens": 512, "max_total_tokens": 768, "max_concurrent_requests": 16}
        expected |= {"max_stop_sequences": 6, "max_best_of": 3, "max_client_batch_size": 3, "validation_workers": 1}
        assert {name: info[name] for name in expected} == expected
        answer = asyncio.run(generate(server.url))
        assert answer.ids
        assert all(len(top) == 7 for top in answer.top)
        lines = server.launcher.log.read_text().splitlines()
        assert all(isinstance(json.loads(line), dict) for line in lines), "every line of the log is JSON"
        assert any("no effect" in line and "disable-custom-kernels" in line for line in lines)


async def fetch(url: str) -> dict[str, object]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        return await response.json()


async def generate(url: str) -> Answer:
    async with Client(url) as client:
        return await client.generate("The capital of France is", max_new_tokens=3, top_n_tokens=7)
