"""A model answers from GGUF as transformers does from its own files: every architecture that is read, and a model in
parts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch

from tests.fakes.gguf_model import SHIFTED, write_gguf_of
from tests.fakes.paged_logits import paged_logits
from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tiny_shard import TinyShard
from tests.server.models.families import VOCAB_SIZE, family, reference_logits, write_model
from tests.server.models.test_families import run_ranks
from tgi.errors import StartupError
from tgi.gguf_settings import ARCHITECTURES
from tgi.model_config import read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import make_group
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.gguf_layouts import LAYOUTS
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
WITHOUT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v2-lite": {"attention_bias": False, "mlp_bias": False, "topk_method": "greedy"},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "mpt": {"attn_config": {"clip_qkv": 1.0}},
    "gpt_oss": {"swiglu_limit": 7.0},
    "mistral": {"sliding_window": None},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": None, "mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "smollm3": {"use_sliding_window": False, "num_hidden_layers": 4, "no_rope_layers": None, "layer_types": None},
    "starcoder2": {"sliding_window": None},
}
CASES = [
    *(("llama", "llama"), ("llama-linear", "llama"), ("llama-yarn", "llama"), ("mistral", "llama")),
    *(("mistral", "mistral3"), ("mixtral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma", "gemma")),
    *(("gemma2", "gemma2"), ("gemma3_text", "gemma3"), ("phi3", "phi3"), ("phi3-longrope", "phi3")),
    *(("qwen2_moe", "qwen2moe"), ("qwen3_moe", "qwen3moe"), ("gpt_oss", "gpt-oss"), ("granite", "granite")),
    *(("smollm3", "smollm3"), ("cohere", "command-r"), ("cohere2", "cohere2"), ("olmo", "olmo"), ("olmo2", "olmo2")),
    *(("deepseek_v2", "deepseek2"), ("deepseek_v2-lite", "deepseek2"), ("deepseek_v3", "deepseek2")),
    ("olmo3", "olmo2"),
    *(("stablelm", "stablelm"), ("stablelm-parallel", "stablelm"), ("phi", "phi2"), ("starcoder2", "starcoder2")),
    *(("gpt2", "gpt2"), ("gpt_bigcode", "starcoder"), ("gpt_neox", "gptneox"), ("gpt_neox-sequential", "gptneox")),
    *(
        ("falcon", "falcon"),
        ("falcon-new", "falcon"),
        ("falcon-one_norm", "falcon"),
        ("bloom", "bloom"),
        ("mpt", "mpt"),
    ),
]


def write_family(name: str, directory: Path) -> PreTrainedModel:
    """A random model of what the format can say."""
    row = family(name)
    return write_model(replace(row, settings={**row.settings, **WITHOUT.get(name, {})}), directory)


@pytest.mark.slow  # transformers makes the models
@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_the_same_logits_as_transformers(tmp_path: Path, name: str, architecture: str) -> None:
    directory = tmp_path / "model"
    model = write_family(name, directory)
    file = write_gguf_of(directory, tmp_path / "model.gguf", architecture)
    found, expected = logits(file), reference_logits(model, PROMPTS[-1])
    assert expected.std() > 0.2  # they tell tokens apart
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    if architecture not in SHIFTED:  # norms were shifted there and back
        assert answers(file) == answers(directory)


def test_every_architecture_that_is_read_is_compared() -> None:
    assert {architecture for _, architecture in CASES} == ARCHITECTURES.keys() == LAYOUTS.keys()


@pytest.mark.slow
def test_experts_one_by_one_are_those_of_a_stack(tmp_path: Path) -> None:
    write_family("mixtral", tmp_path / "model")
    stacked = open_checkpoint(write_gguf_of(tmp_path / "model", tmp_path / "stacked.gguf", "llama"))
    single = open_checkpoint(write_gguf_of(tmp_path / "model", tmp_path / "single.gguf", "llama", stacked=False))
    assert set(single.names()) == set(stacked.names()) == set(open_checkpoint(tmp_path / "model").names())
    for name in single.names():
        assert torch.equal(single.read(name, single.shape(name)), stacked.read(name, single.shape(name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture", "kind", "tolerance"),
    [
        ("qwen3_moe", "qwen3moe", "Q8_0", 0.01),
        ("gpt_oss", "gpt-oss", "Q8_0", 0.01),
        ("gpt_oss", "gpt-oss", "MXFP4", 0.2),
    ],
)
def test_stacks_of_blocks_are_those_of_their_numbers(
    tmp_path: Path, name: str, architecture: str, kind: str, tolerance: float
) -> None:
    """Experts in 32-element blocks read, whole and cut within a block, as the numbers that the blocks stand for."""
    write_family(name, tmp_path / "model")
    blocks = gguf.GGMLQuantizationType[kind]
    plain = open_checkpoint(write_gguf_of(tmp_path / "model", tmp_path / "f32.gguf", architecture))
    checkpoint = open_checkpoint(
        write_gguf_of(tmp_path / "model", tmp_path / "blocks.gguf", architecture, quantised=blocks)
    )
    assert set(checkpoint.names()) == set(plain.names())
    for tensor in (name for name in plain.names() if ".experts." in name):
        shape = plain.shape(tensor)
        whole, exact = checkpoint.read(tensor, shape), plain.read(tensor, shape)
        torch.testing.assert_close(whole, exact, atol=tolerance, rtol=0)
        assert not tensor.endswith("weight") or not torch.equal(whole, exact)
        region = tuple(slice(size // 3 | 1, size - 1) if size > 2 else slice(0, size) for size in shape)
        assert torch.equal(checkpoint.read(tensor, shape, region), whole[region])


@pytest.mark.slow
def test_a_matrix_that_the_file_keeps_in_two_reads_as_one(tmp_path: Path) -> None:
    """DeepSeek's expansion of latents: per head 16 rows for its key, kept transposed, and 20 for its value."""
    write_family("deepseek_v3", tmp_path / "model")
    checkpoint = open_checkpoint(write_gguf_of(tmp_path / "model", tmp_path / "m.gguf", "deepseek2"))
    name, shape = "model.layers.1.self_attn.kv_b_proj.weight", (4 * 36, 24)
    whole = open_checkpoint(tmp_path / "model").read(name, shape)
    assert torch.equal(checkpoint.read(name, shape), whole)
    for rows, columns in ((slice(0, 72), slice(0, 24)), (slice(72, 144), slice(3, 9)), (slice(17, 18), slice(0, 24))):
        assert torch.equal(checkpoint.read(name, shape, (rows, columns)), whole[rows, columns])


@pytest.mark.slow
def test_two_ranks_share_what_is_cut_within_a_block(tmp_path: Path) -> None:
    """48 of 96 inner features and 16 of an expert's 32: no rank's part of a row ends where a block of 32 does."""
    files: list[Path] = []
    for name, architecture in (
        ("llama", "llama"),
        ("qwen3_moe", "qwen3moe"),
        ("gpt_oss", "gpt-oss"),
        ("bloom", "bloom"),
    ):
        write_family(name, tmp_path / name)
        kind = gguf.GGMLQuantizationType.Q8_0
        files.append(write_gguf_of(tmp_path / name, tmp_path / name / "m.gguf", architecture, quantised=kind))
    run_ranks([{"path": str(file), "sequences": PROMPTS[-1:]} for file in files], 2, tmp_path / "job.json")
    for file in files:
        found = torch.from_numpy(np.load(file.with_name("ranks.npz"))["arr_0"])
        torch.testing.assert_close(found, logits(file), atol=1e-4, rtol=0)


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
