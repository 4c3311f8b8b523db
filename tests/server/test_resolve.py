"""Environment -> ShardConfig: watermark, prompt logprobs, the length of a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi.errors import StartupError
from tgi.server.config import ShardConfig
from tgi.server.platforms.detect import platform_of
from tgi.server.resolve import ServeArgs, resolve


def resolved(**environment: str) -> ShardConfig:
    return resolve(ServeArgs(model_id="m"), Path("m"), platform_of("cpu"), {"ATTENTION": "cpu", **environment})


@pytest.mark.fault("TGI#2973")
def test_prompt_logprobs_are_computed_unless_refused() -> None:
    assert resolved().prompt_logprobs
    assert not resolved(REQUEST_LOGPROBS="false").prompt_logprobs


@pytest.mark.row("A: watermark")
def test_a_watermark_has_tgis_defaults_and_variables() -> None:
    plain = resolved()
    assert (plain.watermark_gamma, plain.watermark_delta) == (0.5, 2.0)
    set_ = resolved(WATERMARK_GAMMA="0.25", WATERMARK_DELTA="-1.5")
    assert (set_.watermark_gamma, set_.watermark_delta) == (0.25, -1.5)


@pytest.mark.parametrize(
    "environment",
    [{"WATERMARK_GAMMA": "0"}, {"WATERMARK_GAMMA": "1"}, {"WATERMARK_GAMMA": "nan"}, {"WATERMARK_DELTA": "inf"}],
)
def test_a_watermark_that_means_nothing_is_refused_by_name(environment: dict[str, str]) -> None:
    with pytest.raises(StartupError, match=f"^{next(iter(environment))} must be"):
        resolved(**environment)


def test_the_length_of_a_request_is_known_before_the_model_is_built() -> None:
    assert resolved().max_total_tokens is None
    assert resolved(MAX_TOTAL_TOKENS="2048").max_total_tokens == 2048
    with pytest.raises(StartupError, match=r"^MAX_TOTAL_TOKENS must be at least 1; it is 0$"):
        resolved(MAX_TOTAL_TOKENS="0")


@pytest.mark.parametrize(
    ("environment", "rope"),
    [
        ({}, None),
        ({"ROPE_SCALING": "dynamic", "ROPE_FACTOR": "4"}, ("dynamic", 4.0)),
        ({"ROPE_FACTOR": "2"}, ("linear", 2.0)),
        ({"ROPE_SCALING": "dynamic"}, ("dynamic", 1.0)),
    ],
)
def test_a_scaling_of_positions(environment: dict[str, str], rope: tuple[str, float] | None) -> None:
    assert resolved(**environment).rope == rope


@pytest.mark.parametrize("environment", [{"ROPE_SCALING": "yarn"}, {"ROPE_FACTOR": "0.5"}, {"ROPE_FACTOR": "inf"}])
def test_a_scaling_that_means_nothing_is_refused_by_name(environment: dict[str, str]) -> None:
    with pytest.raises(StartupError, match=f"^{next(iter(environment))} must be"):
        resolved(**environment)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("hung_after", 0.0), ("hung_after", float("nan")), ("budget_scale", 0.05), ("budget_scale", 1.1)],
)
def test_times_and_scales_that_mean_nothing_are_refused_by_name(flag: str, value: float) -> None:
    args = ServeArgs(model_id="m", **{flag: value})
    with pytest.raises(StartupError, match=f"^--{flag.replace('_', '-')} must be"):
        resolve(args, Path("m"), platform_of("cpu"), {"ATTENTION": "cpu"})
