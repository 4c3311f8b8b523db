"""A tokenizer.json is made once from older files; what has no fast form is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from tests.fakes.tiny_model import write_tiny_llama
from tgi import hub
from tgi.errors import StartupError
from tgi.server.prepare.command import prepare

pytestmark = pytest.mark.slow  # transformers takes seconds to import


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose byte-level vocabulary stands in vocab.json and merges.txt alone."""
    folder = write_tiny_llama(tmp_path / "model")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "GPT2Tokenizer"}))
    return folder


def test_from_vocabulary_and_merges(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"must be given a tokenizer\.json\. Do so with: text-generation-server"):
        hub.locate(str(folder), source={})
    assert prepare(str(folder), source={}) == folder == hub.locate(str(folder), source={})
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    original = tokenizers.Tokenizer.from_file(str(write_tiny_llama(tmp_path / "other") / "tokenizer.json"))
    text = "The capital of France is Paris, hello é 12"
    assert made.encode(text, add_special_tokens=False).ids == original.encode(text).ids


def test_what_cannot_be_made_is_refused_by_name(folder: Path) -> None:
    (folder / "vocab.json").write_text("{broken")
    with pytest.raises(
        StartupError, match=r"model has no tokenizer\.json, and none can be made of its other files"
    ) as e:
        prepare(str(folder), source={})
    assert "\n" not in str(e.value)
    assert not (folder / "tokenizer.json").exists()
