"""What a request asks of its sampling holds on every route, plain and streamed, and shows in its text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.servers import LocalRouter, launched, local_server
from tests.fakes.tiny_model import write_tiny_llama
from tests.server.sampling.plain import is_green

pytestmark = [pytest.mark.slow, pytest.mark.row("E: Sampling and seeds")]

LENGTH = 120
PROMPT = "hello world"
USER = [{"role": "user", "content": PROMPT}]
SAMPLED = {"temperature": 1.4, "seed": 4711, "ignore_eos": True}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRouter]:
    with local_server(write_tiny_llama(tmp_path_factory.mktemp("model"), seed=7)) as router:
        yield router


async def ask(client: Client, route: str, stream: bool, **more: Any) -> Answer:
    if route == "chat":
        return await client.chat(USER, stream, max_tokens=LENGTH, **SAMPLED, **more)
    return await client.generate(PROMPT, stream, max_new_tokens=LENGTH, **SAMPLED, **more)


def words_of(pieces: tuple[str, ...]) -> tuple[str, str]:
    """A word of an answer that comes in one token, and two that follow each other in it."""
    word = next(piece for piece in pieces if len(piece) > 3 and piece.strip().isalpha())
    pair = next(a + b for a, b in pairwise(pieces) if word not in (a, b) and is_word(a) and is_word(b))
    return word.strip(), pair.strip()


def is_word(piece: str) -> bool:
    return piece.startswith(" ") and piece.strip().isalpha()


def place_of(word: str, text: str) -> int | None:
    """Where it stands as itself: a part of a longer word is other tokens."""
    found = re.search(f" {word}(?![a-z])", text)
    return None if found is None else found.start()


@pytest.mark.parametrize("route", ["generate", "chat"])
def test_bad_words_are_not_in_the_answer(router: LocalRouter, route: str) -> None:
    """Up to where the word would stand the answer is the one without the ban."""

    async def run() -> None:
        async with Client(router.url) as client:
            free = await ask(client, route, stream=True)
            word, pair = words_of(free.pieces)
            for words in ([word], [pair], ["§", pair, word]):
                plain = await ask(client, route, stream=False, bad_words=words)
                streamed = await ask(client, route, stream=True, bad_words=words)
                assert streamed.told == plain.told
                assert "".join(streamed.pieces) == plain.text
                found = [place for banned in words if (place := place_of(banned, free.text)) is not None]
                assert plain.text.startswith(free.text[: min(found)])
                assert [place_of(banned, plain.text) for banned in words] == [None] * len(words)

    router.run(run())


@pytest.mark.row("A: watermark")
def test_a_watermark_by_the_launchers_flags_is_found_in_the_answer(tmp_path: Path) -> None:
    """By the rule in docs/differences.md: from the ids alone, and not in an answer without."""
    gamma, length = 0.25, 200

    def z_score(ids: tuple[int, ...]) -> float:
        pairs = list(pairwise(ids))
        hits = sum(is_green(token, before, gamma) for before, token in pairs)
        return (hits - gamma * len(pairs)) / (gamma * (1 - gamma) * len(pairs)) ** 0.5

    async def run(url: str) -> tuple[tuple[int, ...], ...]:
        async with Client(url) as client:
            asked = {"max_new_tokens": length, "ignore_eos": True, "seed": 3, "temperature": 1.4}
            plain = await client.generate(PROMPT, **asked)
            marked = await client.generate(PROMPT, watermark=True, **asked)
            streamed = await client.generate(PROMPT, stream=True, watermark=True, **asked)
        assert streamed.ids == marked.ids
        return plain.ids, marked.ids

    model = write_tiny_llama(tmp_path / "model", seed=7)
    flags = ("--watermark-gamma", str(gamma), "--watermark-delta", "8.0")
    with launched("--model-id", str(model), "--max-total-tokens", "512", *flags) as server:
        plain, marked = asyncio.run(run(server.url))
    assert abs(z_score(plain)) < 3
    # All that a delta of 8 leaves red are tokens far more likely than any green one.
    assert z_score(marked) > 15


def native(path: str) -> tuple[str, Callable[[dict[str, Any]], dict[str, Any]], Callable[[Any], str]]:
    def body(sampling: dict[str, Any]) -> dict[str, Any]:
        return {"inputs": PROMPT, "parameters": {"max_new_tokens": LENGTH, **sampling}}

    return path, body, lambda answer: (answer[0] if isinstance(answer, list) else answer)["generated_text"]


ROUTES = [
    native("/"),
    native("/generate"),
    (
        "/v1/completions",
        lambda sampling: {"prompt": PROMPT, "max_tokens": LENGTH, **sampling},
        lambda answer: answer["choices"][0]["text"],
    ),
    (
        "/v1/chat/completions",
        lambda sampling: {"messages": USER, "max_tokens": LENGTH, **sampling},
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    (
        "/v1/responses",
        lambda sampling: {"input": PROMPT, "max_output_tokens": LENGTH, **sampling},
        lambda answer: answer["output"][0]["content"][0]["text"],
    ),
    (
        "/v1/messages",
        lambda sampling: {"messages": USER, "max_tokens": LENGTH, **sampling},
        lambda answer: answer["content"][0]["text"],
    ),
]


@pytest.mark.fault("TGI#1439")
@pytest.mark.parametrize(("path", "body", "read"), ROUTES, ids=[path for path, _, _ in ROUTES])
def test_min_p_leaves_the_best_token_alone(
    router: LocalRouter, path: str, body: Callable[[dict[str, Any]], dict[str, Any]], read: Callable[[Any], str]
) -> None:
    """Of 1: what is drawn is what a greedy request says."""

    async def run() -> None:
        async with Client(router.url) as client:

            async def text(**sampling: Any) -> str:
                status, answer = await client.exchange(path, body({"ignore_eos": True, **sampling}))
                assert status == 200, answer
                return read(answer)

            greedy = await text(**({} if "v1" not in path else {"temperature": 0}))
            assert await text(**SAMPLED, min_p=1.0) == greedy
            assert await text(**SAMPLED, min_p=0.01) != greedy

    router.run(run())


@pytest.mark.fault("TGI#1439")
@pytest.mark.parametrize("route", ["generate", "chat"])
def test_min_p_streamed(router: LocalRouter, route: str) -> None:
    async def run() -> None:
        async with Client(router.url) as client:
            first = await ask(client, route, stream=True, min_p=1.0)
            assert first.told == (await ask(client, route, stream=False, min_p=1.0)).told
            assert first.text != (await ask(client, route, stream=True)).text

    router.run(run())
