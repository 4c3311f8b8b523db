"""A model answers the same from GGUF as from its safetensors: every architecture that is read, and a model in parts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.gguf_model import SHIFTED, write_gguf_of
from tests.fakes.paged_logits import paged_logits
from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tiny_shard import TinyShard
from tests.server.models.families import VOCAB_SIZE, family, write_model
from tgi.errors import StartupError
from tgi.model_config import read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import make_group
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

_RANDOM = random.Random(1)
PROMPTS = [[_RANDOM.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 70)]


def logits(path: Path) -> torch.Tensor:
    """[tokens, vocab] of the longest prompt."""
    config, device = read_model_config(path), torch.device("cpu")
    checkpoint = TrackedCheckpoint(open_checkpoint(path))
    model = build_model(config, checkpoint, torch.float32, device, make_group(0, 1, "localhost", 0, device))
    checkpoint.check_all_read()
    return paged_logits(model, TorchBackend(), [PROMPTS[-1]])[0]


def answers(path: Path) -> list[list[int]]:
    shard = TinyShard(path)
    return [answer.ids for answer in shard.run([shard.admit(prompt, 32, ignore_eos=True) for prompt in PROMPTS])]


# What the format has no key for, or llama.cpp keeps as a constant of the architecture.
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
IMPLIED: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _DEFAULT_ROPE},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "full_attention": _DEFAULT_ROPE | {"rope_theta": 1e6},
            "sliding_attention": _DEFAULT_ROPE,
        },
    },
}


@pytest.mark.slow  # transformers makes the models
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *(("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma", "gemma")),
        *(("gemma2", "gemma2"), ("gemma3_text", "gemma3"), ("phi3", "phi3"), ("phi3-longrope", "phi3")),
    ],
)
def test_the_same_model_as_from_safetensors(tmp_path: Path, name: str, architecture: str) -> None:
    directory = tmp_path / "model"
    write_model(family(name), directory)
    config = json.loads((directory / "config.json").read_text()) | IMPLIED.get(name, {})
    (directory / "config.json").write_text(json.dumps(config))
    file = write_gguf_of(directory, tmp_path / "model.gguf", architecture)
    assert set(open_checkpoint(file).names()) == set(open_checkpoint(directory).names())
    found, expected = logits(file), logits(directory)
    assert expected.std() > 0.2  # they tell tokens apart
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)  # norms were shifted there and back
    if architecture not in SHIFTED:
        assert answers(file) == answers(directory)


def test_a_model_in_parts_reads_as_one(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "model")
    whole = open_checkpoint(write_gguf_of(directory, tmp_path / "whole.gguf", "llama"))
    first = write_gguf_of(directory, tmp_path / "m.gguf", "llama", parts=3)
    checkpoint = open_checkpoint(first)
    assert set(checkpoint.names()) == set(whole.names())
    for name in whole.names():
        assert torch.equal(checkpoint.read(name, whole.shape(name)), whole.read(name, whole.shape(name)))
    assert answers(first) == answers(directory)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "model")
    first = write_gguf_of(directory, tmp_path / "m.gguf", "llama", parts=3)
    second, third = (first.with_name(f"m-0000{number}-of-00003.gguf") for number in (2, 3))
    with pytest.raises(StartupError, match=r"is a later part of a split model; give its first part"):
        open_checkpoint(second)
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(StartupError, match=r"holds the tensor '.*' of another part a second time"):
        open_checkpoint(first)
    third.unlink()
    with pytest.raises(StartupError, match=r"lacks its further parts m-00003-of-00003\.gguf"):
        open_checkpoint(first)
    third.write_bytes(content)
    with pytest.raises(StartupError, match="is the first of 3 parts but is not named so"):
        open_checkpoint(first.rename(tmp_path / "renamed.gguf"))
