"""Sizes and speeds behind the default prefill budget, against values worked out by hand."""

from __future__ import annotations

import pytest

from tests.launcher.test_resolve import GIB, model
from tgi.launcher.compute import (
    CARD_FLOPS,
    Experts,
    default_prefill_tokens,
    model_bytes,
    model_flops_per_token,
    prefill_bytes_per_token,
    read_experts,
)

# Llama 3.1 8B: 32 layers, 4,096 wide, 32 heads and 8 shared ones of 128, 14,336 in between, 128,256 tokens.
LAYER_FLOPS = 2 * 4096 * 128 * (3 * 32 + 2 * 8) + 6 * 4096 * 14336
WEIGHTS = 32 * (3 * 14336 * 4096 + 2 * (32 + 8) * 128 * 4096) + 2 * 4096 * 128256


def test_flops_of_a_token() -> None:
    assert model_flops_per_token(model()) == 32 * LAYER_FLOPS
    assert model_flops_per_token(model(raw={"vision_config": {}})) is None


def test_flops_of_experts() -> None:
    raw = {"num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    assert read_experts(model(raw=raw)) == Experts(total=8, per_token=2, shared=1)
    extra = 2 * 6 * 4096 * 14336
    assert model_flops_per_token(model(raw=raw)) == 32 * (LAYER_FLOPS + extra)


def test_weights_are_close_to_the_published_size() -> None:
    assert model_bytes(model()) == 2 * WEIGHTS
    assert model_bytes(model()) == pytest.approx(2 * 8.03e9, rel=0.01)


def test_bytes_of_a_prompt_token() -> None:
    assert prefill_bytes_per_token(model()) == 8 * 2 * 128 * 2 * 32 + 1.5 * 14336 * 2 * 3


@pytest.mark.parametrize(
    ("changes", "card", "memory", "num_shard", "expected"),
    [
        ({"max_position_embeddings": None}, None, None, 1, 4096),
        ({"max_position_embeddings": None, "model_type": "qwen2_vl"}, None, None, 1, 10000),
        ({"max_position_embeddings": None, "model_type": "qwen2_5_vl"}, None, None, 1, 10000),
        ({"max_position_embeddings": None, "model_type": "gemma3"}, None, None, 1, 8000),
        ({"max_position_embeddings": 2048}, None, None, 1, 2048),
        ({"max_position_embeddings": 131072}, "unknown-card", None, 1, 4096),
        ({"max_position_embeddings": 131072}, "nvidia-l4", None, 1, int(121e12 / (32 * LAYER_FLOPS))),
        ({"max_position_embeddings": 131072}, "nvidia-l4", None, 4, int(4 * 121e12 / (32 * LAYER_FLOPS))),
        ({"max_position_embeddings": 131072}, "nvidia-h200", None, 8, 131072),
        (
            {"max_position_embeddings": None, "num_layers": 32 * 1000},
            "nvidia-t4",
            None,
            1,
            4096,
        ),  # 9 is too few to be true
        ({"raw": {"vision_config": {}}}, "nvidia-h100", None, 1, 4096),
    ],
)
def test_default_prefill_tokens(
    changes: dict[str, object], card: str | None, memory: int | None, num_shard: int, expected: int
) -> None:
    assert default_prefill_tokens(model(**changes), card, memory, num_shard, 0.95) == (expected, None)


def test_memory_bounds_the_prefill() -> None:
    left = 24 * GIB * 0.95 - 2 * WEIGHTS
    expected = int(left / (8 * 2 * 128 * 2 * 32 + 1.5 * 14336 * 2 * 3))
    assert default_prefill_tokens(model(), "nvidia-a10g", 24 * GIB, 1, 0.95)[0] == min(
        expected, int(125e12 / (32 * LAYER_FLOPS))
    )
    tight = int(2 * WEIGHTS / 0.95) + GIB
    tokens, warning = default_prefill_tokens(model(), None, tight, 1, 0.95)
    assert tokens == int((tight * 0.95 - 2 * WEIGHTS) / prefill_bytes_per_token(model()))
    assert tokens < 4096
    assert warning is None


def test_a_model_that_cannot_fit_is_warned_of_with_the_numbers() -> None:
    tokens, warning = default_prefill_tokens(model(), None, 8 * GIB, 1, 0.95)
    assert tokens == 4096
    assert warning is not None
    assert "need about 15.0 GiB" in warning
    assert "7.6 GiB that 1 GPU(s)" in warning


def test_card_table() -> None:
    assert CARD_FLOPS["nvidia-h100-80gb-hbm3"] == CARD_FLOPS["nvidia-h100"] == 900e12
    assert {CARD_FLOPS[name] for name in CARD_FLOPS if "a100" in name} == {312e12}
    assert all(name == name.lower() and " " not in name for name in CARD_FLOPS)
