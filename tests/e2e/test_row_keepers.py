"""Models that keep what they have read by row, served by the programs that serve the others."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.client import Answer, Client
from tests.e2e.servers import launched
from tests.fakes.tiny_model import EOS_ID, write_tiny_llama
from tests.server.models.families import PADDED, RECURRENT, Family, write_model

VOCAB_SIZE = 512  # of the tokenizer
T5 = next(row for row in PADDED if row.name == "t5")


async def ask(url: str) -> list[Answer]:
    async with Client(url) as client:
        texts = ("hello", "the capital of", "hello")
        return await asyncio.gather(*(client.generate(text, max_new_tokens=12, ignore_eos=True) for text in texts))


@pytest.mark.slow
@pytest.mark.parametrize("row", [RECURRENT[0], T5], ids=["mamba", "t5"])
def test_requests_share_steps_and_get_what_they_would_get_alone(row: Family, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)  # for its tokenizer
    write_model(dataclasses.replace(row, settings={**row.settings, "vocab_size": VOCAB_SIZE}), tmp_path)
    with launched("--model-id", str(tmp_path), "--max-total-tokens", "256") as server:
        first, second, third = asyncio.run(ask(server.url))
        assert server.launcher.stop(timeout_s=30) == 0, server.log
    assert [len(answer.ids) for answer in (first, second, third)] == [12, 12, 12]
    assert first.ids == third.ids
    assert "Prefix caching off" in server.log or "Prefix caching is off: this model keeps" in server.log


@pytest.mark.slow
def test_an_encoder_decoder_reads_what_its_tokenizer_adds_and_answers_as_transformers(tmp_path: Path) -> None:
    """T5's tokenizer ends a prompt with </s>, which counts as the prompt's; its decoder begins with a token that nobody
    sees and that counts nowhere."""
    write_tiny_llama(tmp_path)  # for its tokenizer
    end_prompts(tmp_path / "tokenizer.json")
    (tmp_path / "generation_config.json").unlink()
    reference: Any = write_model(
        dataclasses.replace(T5, settings={**T5.settings, "vocab_size": VOCAB_SIZE}, deviation=6.0), tmp_path
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = ["the capital of", "hello world", "we like the day because it is new"]
    ids = [tokenizer.encode(text).ids for text in texts]
    assert all(prompt[-1] == EOS_ID for prompt in ids)
    ends = [EOS_ID]

    def expected(prompt: list[int], num_tokens: int) -> tuple[int, ...]:
        asked = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": ends}
        return tuple(reference.generate(torch.tensor([prompt]), **asked)[0, 1:].tolist())

    # An end of text that comes: the last token of the second answer.
    ends.append(expected(ids[1], 6)[-1])
    settings = tmp_path / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": ends}))

    async def check(url: str) -> None:
        async with Client(url) as client:
            answers = await asyncio.gather(*(client.generate(text, max_new_tokens=30) for text in texts))
            assert [answer.ids for answer in answers] == [expected(prompt, 30) for prompt in ids]
            assert answers[1].finish == "eos_token"
            whole = answers[0]
            streamed = await client.generate(texts[0], stream=True, max_new_tokens=30)
            assert streamed.told == whole.told
            _, completion = await client.exchange(
                "/v1/completions", {"model": "tgi", "prompt": texts[0], "max_tokens": 30, "temperature": 0}
            )
            assert completion["choices"][0]["text"] == whole.text
            assert completion["usage"]["prompt_tokens"] == len(ids[0])
            full = await client.generate(texts[0], max_new_tokens=30, return_full_text=True)
            assert full.text == texts[0] + whole.text
            cut = await client.generate(texts[2], max_new_tokens=9, truncate=4)
            assert cut.ids == expected(ids[2][-4:], 9)
            stop = whole.text[5:8]
            stopped = await client.generate(texts[0], max_new_tokens=30, stop=[stop])
            assert stopped.text == whole.text[: whole.text.index(stop) + len(stop)]
            assert stopped.finish == "stop_sequence"

    arguments = ("--model-id", str(tmp_path), "--max-total-tokens", "256", "--dtype", "float32")
    with launched(*arguments) as server:
        asyncio.run(check(server.url))
        assert server.launcher.stop(timeout_s=30) == 0, server.log


def end_prompts(file: Path) -> None:
    """Have the tokenizer put </s> behind a text."""
    tokenizer = json.loads(file.read_text())
    sequence, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [sequence, end],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [EOS_ID], "tokens": ["</s>"]}},
    }
    file.write_text(json.dumps(tokenizer))
