"""Frequencies of every rope type against transformers' own, both spellings, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.fakes.tiny_model import write_tiny_llama
from tgi.errors import StartupError
from tgi.model_config import read_model_config
from tgi.server.distributed.group import SingleRank
from tgi.server.layers.rotary import Rotary, make_rotary, rotary_of
from tgi.server.layers.source import open_source
from tgi.server.weights.dummy_checkpoint import DummyCheckpoint

DIM, THETA, MAX_POSITIONS = 64, 10_000.0, 8192
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1 + i / 100 for i in range(DIM // 2)],
    "long_factor": [1 + i for i in range(DIM // 2)],
}


def ours(scaling: dict[str, Any] | None, longest: int | None = None, **changes: Any) -> Rotary:
    settings: dict[str, Any] = {"dim": DIM, "theta": THETA, "max_positions": MAX_POSITIONS, **changes}
    return make_rotary(**settings, scaling=scaling, device=CPU, longest=longest)


def theirs(scaling: dict[str, Any], seq_len: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": THETA, **scaling},
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, CPU, seq_len=seq_len)


@pytest.mark.row("E: Rope variants")
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
        LONGROPE,
        {**LONGROPE, "factor": 32.0},
        {**LONGROPE, "attention_factor": 1.5},
    ],
    ids=lambda scaling: "-".join(str(value) for value in list(scaling.values())[:3] if not isinstance(value, list)),
)
def test_equal_to_transformers(scaling: dict[str, Any]) -> None:
    rotary = ours(scaling)
    frequencies, magnitude = theirs(scaling, MAX_POSITIONS)
    torch.testing.assert_close(rotary.frequencies, frequencies, rtol=1e-6, atol=0)
    assert rotary.magnitude == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize("longest", [100, MAX_POSITIONS, 3 * MAX_POSITIONS])
def test_dynamic_is_chosen_for_the_longest_request(longest: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    frequencies, _ = theirs(scaling, longest)
    torch.testing.assert_close(ours(scaling, longest).frequencies, frequencies, rtol=1e-6, atol=0)


def test_longrope_takes_the_short_list_where_no_request_is_long() -> None:
    frequencies, magnitude = theirs(LONGROPE, 4096)
    rotary = ours(LONGROPE, longest=4096)
    torch.testing.assert_close(rotary.frequencies, frequencies, rtol=1e-6, atol=0)
    assert rotary.magnitude == pytest.approx(magnitude)
    assert not torch.equal(rotary.frequencies, ours(LONGROPE, longest=4097).frequencies)


def test_longrope_with_a_magnitude_for_each_list() -> None:
    scaling = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.25}
    assert ours(scaling, longest=4096).magnitude == 1.1
    assert ours(scaling, longest=4097).magnitude == 1.25


@pytest.mark.fault("vllm#6689")
def test_both_spellings_of_the_kind() -> None:
    old = {"type": "llama3", **{key: value for key, value in LLAMA3.items() if key != "rope_type"}}
    assert torch.equal(ours(old).frequencies, ours(LLAMA3).frequencies)
    assert not torch.equal(ours(LLAMA3).frequencies, ours(None).frequencies)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}])
def test_no_scaling(scaling: dict[str, Any] | None) -> None:
    expected = 1 / THETA ** (torch.arange(0, DIM, 2) / DIM)
    torch.testing.assert_close(ours(scaling).frequencies, expected)


def test_divisors_of_a_gguf_file() -> None:
    divisors = torch.linspace(1, 8, DIM // 2)
    rotary = ours(None, divisors=divisors)
    torch.testing.assert_close(rotary.frequencies, ours(None).frequencies / divisors)


@pytest.mark.fault("TGI#2172")
@pytest.mark.parametrize("kind", ["mrope", "ntk", "proportional"])
def test_an_unknown_kind_is_named(kind: str) -> None:
    with pytest.raises(StartupError, match=f"type '{kind}' is not supported; default, linear"):
        ours({"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "factor must be a positive number, not None"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a positive number, not '2'"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor must be a positive number"),
        ({**LONGROPE, "long_factor": [1.0]}, "long_factor must be a list of 32 numbers, not 1 numbers"),
        ({**LONGROPE, "long_factor": None}, "long_factor must be a list of 32 numbers, not None"),
    ],
)
def test_values_that_make_no_sense_are_named(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        ours(scaling)


def test_turns_of_positions() -> None:
    positions = torch.tensor([0, 3, 100_000])
    rotation = ours(YARN)(positions)
    rotary = ours(YARN)
    angles = positions.unsqueeze(1).double() * rotary.frequencies.double()
    torch.testing.assert_close(rotation.cos.double(), angles.cos() * rotary.magnitude, atol=1e-2, rtol=0)
    torch.testing.assert_close(rotation.sin[:2].double(), angles.sin()[:2] * rotary.magnitude, atol=1e-6, rtol=0)
    assert rotation.cos.dtype == torch.float32
    assert rotation.cos.shape == (3, DIM // 2)


# --- what config.json says of it --------------------------------------------


def rotary_from(tmp_path: Path, **settings: Any) -> Callable[..., Rotary]:
    """`rotary_of` for a configuration with these settings, 4 heads of 16."""
    config = read_model_config(write_tiny_llama(tmp_path, **settings))
    source = open_source(
        DummyCheckpoint(torch.float32, CPU),
        quant_method=None,
        dtype=torch.float32,
        device=CPU,
        group=SingleRank(),
        packed={},
    )
    return lambda **options: rotary_of(config, source, **options)


def test_each_kind_of_layer_has_its_own_settings(tmp_path: Path) -> None:
    rotary = rotary_from(
        tmp_path,
        rope_scaling=None,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        },
    )
    local, everywhere = rotary(kind="sliding_attention"), rotary(kind="full_attention")
    torch.testing.assert_close(local.frequencies, 100.0 ** (-torch.arange(8) / 8))
    torch.testing.assert_close(everywhere.frequencies, 10_000.0 ** (-torch.arange(8) / 8) / 4)


def test_part_of_a_head_and_interleaved(tmp_path: Path) -> None:
    rotary = rotary_from(tmp_path, partial_rotary_factor=0.5)(interleaved=True)
    assert len(rotary.frequencies) == 4
    rotation = rotary(torch.arange(3))
    assert rotation.interleaved
    assert rotation.cos.shape == (3, 4)


def test_the_trained_length_may_stand_beside_the_scaling(tmp_path: Path) -> None:
    """As in Phi-3's files, the older of which call it "su"."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rotary = rotary_from(
        tmp_path,
        rope_scaling={"type": "su", **factors},
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
    )
    plain = 10_000.0 ** (-torch.arange(8) / 8)
    torch.testing.assert_close(rotary(longest=1024).frequencies, plain)
    torch.testing.assert_close(rotary(longest=1025).frequencies, plain / 2)
    torch.testing.assert_close(rotary().frequencies, plain / 2)
    assert rotary().magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
