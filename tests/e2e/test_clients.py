"""Many calls at once through the clients' asynchronous halves: each has its own answer, equal ones the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import text_generation
from huggingface_hub import AsyncInferenceClient
from openai import AsyncOpenAI

from benchmarks.server_process import Server

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

COUNTRIES = ("France", "Italy", "Japan", "Spain")


def question(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me about {country} in one sentence."}]


async def all_at_once(ask: Callable[[str], Awaitable[str]]) -> None:
    """Every country several times. The answer names the country it was asked for, and no other."""
    asked = COUNTRIES * 4
    for country, answer in zip(asked, await asyncio.gather(*map(ask, asked))):
        assert [name for name in COUNTRIES if name in answer] == [country], answer


@pytest.mark.fault("TGI#1776", "TGI#2985")
@pytest.mark.row("F: openai client")
def test_openai(bundled_server: Server) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{bundled_server.url}/v1", api_key="-", max_retries=0) as client:

            async def ask(country: str) -> str:
                stream = await client.chat.completions.create(
                    model="tgi",
                    messages=question(country),  # pyright: ignore
                    max_tokens=20,
                    temperature=0,
                    stream=True,
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

            await all_at_once(ask)

    asyncio.run(run())


@pytest.mark.row("F: Hub client")
def test_hub_client(bundled_server: Server) -> None:
    async def run() -> None:
        async with AsyncInferenceClient(bundled_server.url) as client:

            async def ask(country: str) -> str:
                answer = await client.chat_completion(question(country), max_tokens=20, temperature=0)
                return answer.choices[0].message.content or ""

            await all_at_once(ask)

    asyncio.run(run())


@pytest.mark.row("F: Old Python client")
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # the client's own
def test_old_client(bundled_server: Server) -> None:
    client = text_generation.AsyncClient(bundled_server.url, timeout=120)

    async def ask(country: str) -> str:
        pieces = [
            event.token.text
            async for event in client.generate_stream(
                f"Item: {country}, Item: {country}, Item: {country}, Item:", max_new_tokens=4
            )
        ]
        return "".join(pieces)

    asyncio.run(all_at_once(ask))


@pytest.mark.row("F: Behaviour that TGI's integration tests exercise", "G: 3 the same seed alone and under load")
def test_the_same_question_has_the_same_answer_in_company(bundled_server: Server) -> None:
    """Log probabilities within what TGI's own tests allow."""
    asked: dict[str, Any] = {"max_new_tokens": 8, "details": True, "return_full_text": False, "seed": 3}

    async def run() -> None:
        async with AsyncInferenceClient(bundled_server.url) as client:

            async def ask() -> tuple[str, list[float]]:
                answer = await client.text_generation("What is Deep Learning?", **asked)
                assert answer.details is not None
                return answer.generated_text, [token.logprob for token in answer.details.tokens]

            text, chances = await ask()
            for found in await asyncio.gather(*(ask() for _ in range(8))):
                assert found == (text, pytest.approx(chances, rel=0.2))

    asyncio.run(run())
