"""The pool: same ids as without it, a live event loop beside a long text, and a clean end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.fakes.tokenizer import byte_tokenizer
from tgi import hub
from tgi.errors import InvalidRequest
from tgi.text.pool import LONG_TEXT, EncodePool
from tgi.text.tokenizer import SHORT_TEXT, Encoding, Tokenizer, load_tokenizer


@pytest.mark.parametrize("length", [0, 3, SHORT_TEXT + 1, LONG_TEXT + 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_ids_and_offsets_are_the_tokenizers(length: int, workers: int) -> None:
    tokenizer = byte_tokenizer()
    pool = EncodePool(tokenizer, workers)

    async def encode() -> Encoding:
        return await pool.encode("x" * length, add_special_tokens=False, with_offsets=True)

    encoding = asyncio.run(encode())
    pool.close()
    assert encoding.ids == tokenizer.encode("x" * length, add_special_tokens=False).ids
    assert encoding.offsets == [(i, i + 1) for i in range(length)]


def test_errors_reach_the_caller() -> None:
    pool = EncodePool(byte_tokenizer(), 2)

    async def encode() -> None:
        for length in (1, SHORT_TEXT + 1):
            with pytest.raises(InvalidRequest):
                await pool.encode("\ud800" * length)

    asyncio.run(encode())
    pool.close()
    with pytest.raises(ValueError, match="num_workers"):
        EncodePool(byte_tokenizer(), 0)


class Gated(Tokenizer):
    """Encodes long texts only once the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.short = byte_tokenizer()

    def encode(self, text: str, *arguments: Any, **more: Any) -> Encoding:
        if len(text) > LONG_TEXT:
            self.gate.wait()
        return self.short.encode(text, *arguments, **more)


def test_a_text_of_ordinary_length_does_not_wait_behind_a_long_one() -> None:
    tokenizer = Gated()
    pool = EncodePool(tokenizer, 2)

    async def race() -> None:
        long = asyncio.create_task(pool.encode("x" * (LONG_TEXT + 1)))
        second = asyncio.create_task(pool.encode("x" * (LONG_TEXT + 1)))
        await asyncio.sleep(0)
        assert len(await pool.encode("y" * (SHORT_TEXT + 1))) == SHORT_TEXT + 1
        assert not long.done()
        second.cancel()  # waits still: never begun
        tokenizer.gate.set()
        assert len(await long) == LONG_TEXT + 1
        with pytest.raises(asyncio.CancelledError):
            await second

    asyncio.run(race())
    pool.close()


@pytest.mark.real_model
def test_the_loop_stays_alive_beside_a_prompt_of_60_000_words() -> None:
    tokenizer = load_tokenizer(hub.locate(hub.BUNDLED_MODEL))
    text = "The quick brown fox jumps over the lazy dog. " * 6_700
    pool = EncodePool(tokenizer, 2)

    async def watch() -> tuple[int, int]:
        task = asyncio.create_task(pool.encode(text, add_special_tokens=False))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        return len(await task), turns

    num_tokens, turns = asyncio.run(watch())
    pool.close()
    assert num_tokens == 67_001
    assert turns >= 5, "the loop stood still: something held the interpreter while it encoded"
