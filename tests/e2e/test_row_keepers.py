"""Models that keep what they have read by row, served by the programs that serve the others."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.servers import launched
from tests.fakes.tiny_model import write_tiny_llama
from tests.server.models.families import PADDED, RECURRENT, Family, write_model

VOCAB_SIZE = 512  # of the tokenizer
T5 = next(row for row in PADDED if row.name == "t5")


async def ask(url: str) -> list[Answer]:
    async with Client(url) as client:
        texts = ("hello", "the capital of", "hello")
        return await asyncio.gather(*(client.generate(text, max_new_tokens=12, ignore_eos=True) for text in texts))


@pytest.mark.slow
@pytest.mark.parametrize("row", [*RECURRENT, T5], ids=["mamba", "t5"])
def test_requests_share_steps_and_get_what_they_would_get_alone(row: Family, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)  # for its tokenizer
    write_model(dataclasses.replace(row, settings={**row.settings, "vocab_size": VOCAB_SIZE}), tmp_path)
    with launched("--model-id", str(tmp_path), "--max-total-tokens", "256") as server:
        first, second, third = asyncio.run(ask(server.url))
        assert server.launcher.stop(timeout_s=30) == 0, server.log
    assert [len(answer.ids) for answer in (first, second, third)] == [12, 12, 12]
    assert first.ids == third.ids
    assert "Prefix caching off" in server.log or "Prefix caching is off: this model keeps" in server.log
