"""The bundled model's greedy tokens against a reference made with transformers, through the whole server in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Measured
from tests.e2e.client import Answer, Client
from tests.e2e.references import Reference, bfloat16_agreement, read_references
from tests.e2e.servers import Whole, launched
from tests.e2e.workload import SMALL_MARGIN
from tests.fakes.tokenizer import unpacked
from tgi import hub
from tgi.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

AT_ONCE = 32
BLOCK = 64
LEAST_AGREEMENT = 80  # per cent: bfloat16 has ties, but a model that is wrong agrees by chance alone


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    return read_references("smollm2_greedy.json")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(hub.locate(hub.BUNDLED_MODEL))


@pytest.fixture(scope="module")
def server() -> Iterator[Whole]:
    with launched("--dtype", "float32", environment={"OMP_NUM_THREADS": ""}) as server:
        yield server


async def ask(client: Client, reference: Reference, stream: bool, **more: Any) -> Answer:
    length = len(reference.ids)
    if reference.kind == "raw":
        return await client.generate(reference.prompt, stream, max_new_tokens=length, **more)
    messages = [{"role": "user", "content": reference.prompt}]
    return await client.chat(messages, stream, max_tokens=length, temperature=0, **more)


def assert_same(answer: Answer, reference: Reference, tokenizer: Tokenizer, start: int = 0) -> None:
    if answer.ids:
        reference.assert_same(answer.ids, start)
    else:
        # /v1 names no ids. No margin of these is small, so the text has to be the reference's.
        assert min(reference.margins) > SMALL_MARGIN
        assert answer.text == tokenizer.decode(reference.ids[start:])


@pytest.mark.row("E: Architectures", "B: Chat templates")
def test_alone_streamed_and_plain(server: Whole, references: list[Reference], tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with Client(server.url) as client:
            for reference in references:
                cold = await ask(client, reference, stream=False)
                assert_same(cold, reference, tokenizer)
                again = await ask(client, reference, stream=True)
                assert (again.text, again.finish) == (cold.text, cold.finish)
                if reference.kind == "chat":
                    assert (cold.prompt_tokens, cold.cached_tokens) == (len(reference.input_ids), 0)

    asyncio.run(run())


@pytest.mark.row("B: Assistant continuation", "G: 5 a repeated long prompt")
def test_going_on_from_cached_text(server: Whole, references: list[Reference], tokenizer: Tokenizer) -> None:
    """The prompts are shorter than a block; with half of their answers they are not, and that was computed before."""
    chats = [reference for reference in references if reference.kind == "chat"]
    long = [(reference, cut) for reference in chats if (cut := cut_after_a_block(reference, tokenizer))]
    assert len(long) > 1

    async def run() -> None:
        async with Client(server.url) as client:
            for reference, cut in long:
                begun = tokenizer.decode(reference.ids[:cut])
                messages = [{"role": "user", "content": reference.prompt}, {"role": "assistant", "content": begun}]
                rest: dict[str, Any] = {"temperature": 0, "max_tokens": len(reference.ids) - cut}
                await ask(client, reference, stream=False)
                hot = await client.chat(messages, **rest)
                assert (hot.prompt_tokens, hot.cached_tokens) == (len(reference.input_ids) + cut, BLOCK)
                assert_same(hot, reference, tokenizer, start=cut)
                cold = await client.chat(messages, stream=True, cache=False, **rest)
                assert cold.cached_tokens == 0
                assert (cold.text, cold.finish) == (hot.text, hot.finish)

    asyncio.run(run())


def cut_after_a_block(reference: Reference, tokenizer: Tokenizer) -> int:
    """After how many tokens of the answer the prompt has more than a block and is tokenized as it was generated."""
    for cut in range(max(1, BLOCK + 1 - len(reference.input_ids)), len(reference.ids) - 8):
        begun = tokenizer.decode(reference.ids[:cut])
        ids = unpacked(tokenizer.encode(reference.text_in + begun, add_special_tokens=False).ids)
        if begun == begun.rstrip() and tuple(ids) == reference.input_ids + reference.ids[:cut]:
            return cut
    return 0


@pytest.mark.fault("TGI#2985", "vllm#5898", "TGI#1776")
@pytest.mark.row("E: Batch life cycle")
def test_many_at_once(server: Whole, references: list[Reference], tokenizer: Tokenizer) -> None:
    """Streamed and plain, on both routes, prompts from the cache and not, all in one batch."""

    async def run() -> list[Answer]:
        async with Client(server.url) as client, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(ask(client, reference, stream=index % 2 == 0, cache=index % 3 != 0))
                for index, reference in enumerate(asked)
            ]
        return [task.result() for task in tasks]

    asked = (references * 4)[:AT_ONCE]
    for answer, reference in zip(asyncio.run(run()), asked):
        assert_same(answer, reference, tokenizer)


def test_bfloat16_agrees_for_the_most_part(references: list[Reference], measured: Measured) -> None:
    agreement = bfloat16_agreement(hub.locate(hub.BUNDLED_MODEL), references)
    measured("bfloat16 agreement of SmolLM2 with transformers", agreement, "% of tokens")
    assert agreement > LEAST_AGREEMENT
