"""What streams, joined, is what the plain answer says, on every route: whole characters, stop strings, reasons."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import Server
from tests.e2e.client import Answer, Client
from tests.e2e.servers import LocalRouter, local_server
from tests.e2e.workload import at_once
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

BROKEN = "�"
USER = [{"role": "user", "content": "Hello"}]
# The bundled model goes on with the pattern, and most of its characters take several tokens.
PATTERN = "日本語 😀🎉 한국어 🌍 " * 6


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRouter]:
    model: Path = write_tiny_llama(tmp_path_factory.mktemp("model"), seed=11)
    with local_server(model) as router:
        yield router


def sampled(seed: int) -> dict[str, Any]:
    return {"temperature": 1.4, "seed": seed, "ignore_eos": True}


def is_cut(answer: Answer) -> bool:
    """Did a character need several tokens?"""
    return "" in answer.pieces and any(ord(letter) > 127 and letter != BROKEN for letter in answer.text)


@pytest.mark.fault("TGI#1024", "TGI#1776")
@pytest.mark.row("E: Incremental detokenization", "A: POST /generate_stream", "B: /v1/chat/completions")
def test_random_bytes(router: LocalRouter) -> None:
    """A random model writes random bytes: broken characters, and at times whole ones that took several tokens."""

    async def run() -> tuple[list[Answer], list[Answer]]:
        async with Client(router.url) as client:
            native = [
                lambda s=seed, stream=stream: client.generate("Hello", stream, max_new_tokens=200, **sampled(s))
                for seed in range(12)
                for stream in (False, True)
            ]
            chat = [
                lambda s=seed, stream=stream: client.chat(USER, stream, max_tokens=200, **sampled(s))
                for seed in range(12)
                for stream in (False, True)
            ]
            return await at_once(12, native), await at_once(12, chat)

    native, chat = router.run(run())
    for answers in (native, chat):
        for plain, streamed in zip(answers[::2], answers[1::2]):
            assert "".join(streamed.pieces) == "".join(plain.pieces) == plain.text
            assert streamed.told == plain.told
            assert plain.text
        assert len({answer.text for answer in answers}) == 12
    assert any(is_cut(answer) for answer in native)
    assert any(BROKEN in answer.text for answer in native)


@pytest.mark.real_model
def test_emoji_and_cjk(bundled_server: Server) -> None:
    async def run() -> tuple[Answer, Answer, Answer, Answer]:
        async with Client(bundled_server.url) as client:
            raw: dict[str, Any] = {"max_new_tokens": 40}
            sent: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
            messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": PATTERN.strip()}]
            return (
                await client.generate(PATTERN, **raw),
                await client.generate(PATTERN, stream=True, **raw),
                await client.chat(messages, **sent),
                await client.chat(messages, stream=True, **sent),
            )

    plain, streamed, chat, chat_streamed = asyncio.run(run())
    assert is_cut(streamed)
    assert any(letter in streamed.text for letter in "😀🎉🌍")
    assert any(letter in streamed.text for letter in "日本語한국어")
    assert BROKEN not in streamed.text.rstrip(BROKEN)
    assert "".join(streamed.pieces) == plain.text
    assert streamed.told == plain.told
    assert chat_streamed.told == chat.told
    assert is_cut(chat_streamed)


@pytest.mark.fault("TGI#1724", "TGI#1999", "vllm#1973", "lmdeploy#3131")
@pytest.mark.row("A: stop")
def test_a_stop_string_that_ends_inside_a_token(router: LocalRouter) -> None:
    """Native routes keep the stop string and cut right behind it; /v1 ends before it."""

    async def run() -> None:
        async with Client(router.url) as client:
            native = await client.generate("Hello", stream=True, max_new_tokens=60, **sampled(1))
            text, stop, num_pieces = stop_inside(native)
            for stream in (False, True):
                found = await client.generate("Hello", stream, max_new_tokens=60, stop=[stop, "§"], **sampled(1))
                assert found.text == text + stop
                assert "".join(found.pieces) == found.text
                assert found.ids == native.ids[: len(found.ids)]
                assert len(found.pieces) == num_pieces
                assert (found.finish, found.stop_reason) == ("stop_sequence", stop)
            chat = await client.chat(USER, stream=True, max_tokens=60, **sampled(2))
            text, stop, _ = stop_inside(chat)
            for stream in (False, True):
                found = await client.chat(USER, stream, max_tokens=60, stop=["§", stop], **sampled(2))
                assert found.text == text
                assert (found.finish, found.stop_reason) == ("stop", stop)

    router.run(run())


def is_word(piece: str) -> bool:
    return piece.isascii() and piece.strip().isalpha()


def stop_inside(answer: Answer) -> tuple[str, str, int]:
    """(text before it, a stop string that ends inside a token and begins in an earlier one, pieces up to its end)."""
    before = ""
    for index, piece in enumerate(answer.pieces):
        if index > 5 and len(piece) > 2 and BROKEN not in before[-3:] + piece:
            stop = before[-2:] + piece[:2]
            if answer.text.index(stop) == len(before) - 2:
                return before[:-2], stop, index + 1
        before += piece
    raise AssertionError(f"no such place in {answer}")


@pytest.mark.row("A: stop")
def test_a_stop_string_within_min_tokens_does_not_end_the_answer(router: LocalRouter) -> None:
    async def run() -> None:
        async with Client(router.url) as client:
            native = await client.generate("Hello", stream=True, max_new_tokens=60, **sampled(1))
            _, stop, _ = stop_inside(native)
            asked = {"max_new_tokens": 60, "stop": [stop], **sampled(1)}
            num_tokens = len((await client.generate("Hello", **asked)).ids)
            for stream in (False, True):
                ended = await client.generate("Hello", stream, min_tokens=num_tokens - 1, **asked)
                assert (len(ended.ids), ended.finish) == (num_tokens, "stop_sequence")
                longer = await client.generate("Hello", stream, min_tokens=num_tokens, **asked)
                assert len(longer.ids) > num_tokens
                assert longer.ids == native.ids[: len(longer.ids)]
                assert stop in longer.text

    router.run(run())


@pytest.mark.fault("lmdeploy#3131")
@pytest.mark.row("A: stop")
def test_a_stop_token_stays_in_the_text_where_a_stop_string_does(router: LocalRouter) -> None:
    async def run() -> None:
        async with Client(router.url) as client:
            free = await client.generate("Hello", stream=True, max_new_tokens=60, **sampled(3))
            texts = free.pieces
            assert len(texts) == len(free.ids), "special tokens would have no piece"
            # Behind a whole character, and nowhere before.
            index = next(i for i in range(3, 60) if is_word(texts[i - 1]) and is_word(texts[i]))
            before, piece, stop = "".join(texts[:index]), texts[index], free.ids[index]
            assert stop not in free.ids[:index]
            for include, native_text, v1_text in (
                ({}, before + piece, before),
                ({"include_stop_str_in_output": False}, before, before),
                ({"include_stop_str_in_output": True}, before + piece, before + piece),
            ):
                asked = {"stop_token_ids": [stop], **include, **sampled(3)}
                for stream in (False, True):
                    found = await client.generate("Hello", stream, max_new_tokens=60, **asked)
                    assert (found.text, found.ids) == (native_text, free.ids[: index + 1])
                    assert "".join(found.pieces) == found.text
                    assert (found.finish, found.stop_reason) == ("stop_sequence", stop)
                _, answer = await client.exchange("/v1/completions", {"prompt": "Hello", "max_tokens": 60, **asked})
                (choice,) = answer["choices"]
                assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (v1_text, "stop", stop)
                assert answer["usage"]["completion_tokens"] == index + 1

    router.run(run())


@pytest.mark.fault("TGI#2466", "TGI#2296", "vllm#27572")
@pytest.mark.real_model
def test_finish_reasons(bundled_server: Server) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )

    async def run() -> None:
        async with Client(bundled_server.url) as client:
            for stream in (False, True):
                ended = await client.generate(prompt, stream, max_new_tokens=30)
                assert (ended.text, ended.finish) == ("The capital of France is Paris.", "eos_token")
                assert len(ended.ids) == 8
                chat = await client.chat(question, stream, max_tokens=30, temperature=0)
                assert (chat.text, chat.finish) == (ended.text, "stop")
                # The end of the text on the last possible token is still its end.
                exact = await client.generate(prompt, stream, max_new_tokens=8)
                assert (exact.text, exact.finish) == (ended.text, "eos_token")
                short = await client.generate(prompt, stream, max_new_tokens=7)
                assert (short.text, short.finish) == (ended.text, "length")
                assert (await client.chat(question, stream, max_tokens=3, temperature=0)).finish == "length"
                stopped = await client.generate(prompt, stream, max_new_tokens=30, stop=["Fra"])
                assert (stopped.text, stopped.finish) == ("The capital of Fra", "stop_sequence")
                cut = await client.chat(question, stream, max_tokens=30, temperature=0, stop="Fra")
                assert (cut.text, cut.finish) == ("The capital of ", "stop")

    asyncio.run(run())
