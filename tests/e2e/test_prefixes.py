"""What a server computes of prompts that begin alike, counted in its steps; and that sharing changes no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Client
from tests.e2e.servers import LocalRouter, local_server
from tests.e2e.steps import prompt_tokens_computed, recorded_steps
from tests.e2e.workload import Comparison, Request
from tests.fakes.scripted_shard import ids_of
from tests.fakes.tiny_model import write_tiny_llama
from tgi.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

PROMPT = 2_000  # tokens
LONG_TEXT = " ".join(f"question {number} about the people of the world," for number in range(400))
# Words of one token each, so that an answer made of them reads back as the ids it was made of.
WORDS = ("the", "and", "that", "have", "for", "not", "with", "you", "this", "but")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), max_position=4096, seed=3)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def router(model: Path) -> Iterator[LocalRouter]:
    with local_server(model, max_total_tokens=4096, max_batch_prefill_tokens=512) as router:
        yield router


@pytest.mark.row("D: Radix prefix cache")
@pytest.mark.parametrize("together", [2, 5])
def test_a_prompt_sent_several_times_at_once_is_computed_once(
    router: LocalRouter, tokenizer: Tokenizer, together: int
) -> None:
    parameters: dict[str, Any] = {"truncate": PROMPT, "max_new_tokens": 24, "top_n_tokens": 5, "ignore_eos": True}
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 5}
    block_size, stats = router.core.allocator.block_size, router.core.stats
    cached = (PROMPT - 1) // block_size * block_size  # of all but the first
    requests = [
        Request("generate", LONG_TEXT, True, parameters | ({"seed": seed, **sampled} if seed else {}))
        for seed in range(together)
    ]
    comparison = Comparison(tokenizer)

    async def run() -> None:
        async with Client(router.url) as client:
            with recorded_steps(router) as cold_steps:
                cold = [
                    await Request("generate", LONG_TEXT, True, {**request.parameters, "cache": False}).send(client)
                    for request in requests
                ]
            assert prompt_tokens_computed(cold_steps) == together * PROMPT
            router.core.flush_cache()
            told, hit = stats.prompt_tokens, stats.cached_tokens
            with recorded_steps(router) as steps:
                found = await asyncio.gather(*(request.send(client) for request in requests))
            assert prompt_tokens_computed(steps) == PROMPT + (together - 1) * (PROMPT - cached)
            assert stats.prompt_tokens - told == together * PROMPT
            assert stats.cached_tokens - hit == (together - 1) * cached
            for request, one, alone in zip(requests, found, cold, strict=True):
                comparison.compare(one, alone, request)

    router.run(run())
    comparison.report(f"{together} equal prompts of {PROMPT} tokens")


@pytest.mark.row("D: Radix prefix cache")
def test_the_next_turn_of_a_chat_computes_its_own_text_and_a_block_at_most(
    router: LocalRouter, tokenizer: Tokenizer
) -> None:
    block_size = router.core.allocator.block_size
    ids = [ids_of(tokenizer.encode(f" {word}").ids) for word in WORDS]
    assert all(len(of_word) == 1 for of_word in ids)
    body: dict[str, Any] = {
        "max_tokens": 150,
        "temperature": 0,
        "logit_bias": {str(of_word[0]): 100 for of_word in ids},
    }
    messages: list[dict[str, str]] = []

    async def turn(client: Client, **fields: Any) -> tuple[str, dict[str, Any], int]:
        """-> what it says, its usage, prompt tokens computed"""
        with recorded_steps(router) as steps:
            status, answer = await client.exchange("/v1/chat/completions", {"messages": messages, **body, **fields})
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"], answer["usage"], prompt_tokens_computed(steps)

    async def run() -> None:
        known = 0  # tokens of the chat so far, the last answer's included
        async with Client(router.url) as client:
            for number in range(4):
                messages.append({"role": "user", "content": f"{number}: {LONG_TEXT[: 700 + 333 * number]}"})
                text, usage, computed = await turn(client)
                new = usage["prompt_tokens"] - known
                assert computed <= new + (block_size if number else 0)
                assert computed + usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
                cold_text, cold_usage, cold_computed = await turn(client, cache=False)
                assert (text, usage["completion_tokens"]) == (cold_text, cold_usage["completion_tokens"])
                assert cold_computed == usage["prompt_tokens"]
                known = usage["prompt_tokens"] + usage["completion_tokens"]
                messages.append({"role": "assistant", "content": text})

    router.run(run())
