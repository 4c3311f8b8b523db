"""The table of environment variables and its readers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tgi import env
from tgi.env import VARIABLES, Kind, Variable
from tgi.errors import StartupError


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ATTENTION", "paged", "paged"),
        ("ATTENTION", "  paged ", "paged"),
        ("ATTENTION", "", None),
        ("ATTENTION", "   ", None),
        ("RANK", "3", 3),
        ("RANK", "", 0),
        ("TGI_WIGGLE_ROOM", "0.8", 0.8),
        ("PREFIX_CACHING", "1", True),
        ("PREFIX_CACHING", "True", True),
        ("PREFIX_CACHING", "YES", True),
        ("PREFIX_CACHING", "0", False),
        ("PREFIX_CACHING", "false", False),
        ("PREFIX_CACHING", "", None),
        ("PREFILL_CHUNKING", "", True),
        ("PREFILL_CHUNKING", "off", False),
        ("CUDA_GRAPHS", "1,2, 4,", (1, 2, 4)),
        ("CUDA_GRAPHS", "", ()),
        ("LOG_LEVEL", "", "info"),
    ],
)
def test_typed_values(name: str, text: str, expected: Any) -> None:
    assert env.get(name, {name: text}) == expected
    assert env.is_set(name, {name: text}) is bool(text.strip())


def test_unset_gives_the_default() -> None:
    for name, variable in VARIABLES.items():
        assert env.get(name, {}) == variable.default
        assert not env.is_set(name, {})


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("RANK", "two", "integer"),
        ("RANK", "1.5", "integer"),
        ("TGI_WIGGLE_ROOM", "most", "number"),
        ("PREFIX_CACHING", "2", "true or false"),
        ("CUDA_GRAPHS", "1;2", "comma list of integers"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, text: str, kind: str) -> None:
    with pytest.raises(StartupError) as raised:
        env.get(name, {name: text})
    assert str(raised.value) == f"Invalid value {text!r} in the environment variable {name}: expected {kind}"


def test_a_variable_without_a_row_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        env.get("NO_SUCH_VARIABLE", {})


def test_the_environment_itself_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION", "paged")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert env.get("ATTENTION") == "paged"
    assert env.get("WORLD_SIZE") == 1
    assert env.is_set("ATTENTION")
    assert not env.is_set("WORLD_SIZE")
    assert env.snapshot()["ATTENTION"] == "paged"


def test_defaults_for_libraries_do_not_overrule_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGI_TEST_SET", "mine")
    monkeypatch.delenv("TGI_TEST_UNSET", raising=False)
    env.set_defaults({"TGI_TEST_SET": "default", "TGI_TEST_UNSET": "default"})
    assert os.environ["TGI_TEST_SET"] == "mine"
    assert os.environ.pop("TGI_TEST_UNSET") == "default"


def test_child_environment() -> None:
    source = {"KEEP": "1", "CHANGE": "1", "DROP": "1"}
    child = env.child_environment({"CHANGE": "2", "DROP": None, "ABSENT": None, "NEW": "3"}, source)
    assert child == {"KEEP": "1", "CHANGE": "2", "NEW": "3"}
    assert source == {"KEEP": "1", "CHANGE": "1", "DROP": "1"}


# Variables that TGI's programs read beside the mirrors of flags.
TGI_VARIABLES = """
    ATTENTION PREFIX_CACHING PREFILL_CHUNKING TGI_WIGGLE_ROOM CUDA_GRAPHS CUDA_MEMORY_FRACTION XPU_MEMORY_FRACTION
    REQUEST_LOGPROBS USE_FLASH_ATTENTION DISABLE_EXLLAMA EXLLAMA_VERSION USE_CUTLASS_W8A8
    ROCM_USE_FLASH_ATTN_V2_TRITON ROCM_USE_CUSTOM_PAGED_ATTN ROCM_USE_SKINNY_GEMM PYTORCH_TUNABLEOP_ENABLED
    PYTORCH_TUNABLEOP_TUNING PYTORCH_TUNABLEOP_SEQLENS PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP WATERMARK_GAMMA
    WATERMARK_DELTA HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_API_TOKEN HF_HOME HUGGINGFACE_HUB_CACHE HF_HUB_OFFLINE
    HF_HUB_ENABLE_HF_TRANSFER HF_HUB_USER_AGENT_ORIGIN HF_KERNELS_CACHE WEIGHTS_CACHE_OVERRIDE COMPUTE_TYPE
    LOG_LEVEL LOG_COLORIZE AIP_HTTP_PORT AIP_PREDICT_ROUTE AIP_HEALTH_ROUTE DEBUG OMP_NUM_THREADS DOCKER_LABEL
    GIT_SHA RANK WORLD_SIZE MASTER_ADDR MASTER_PORT MAX_TOTAL_TOKENS MAX_BATCH_SIZE ROPE_SCALING ROPE_FACTOR
    LORA_ADAPTERS DISABLE_CUSTOM_KERNELS MAX_IMAGE_FETCH_SIZE CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES
    ZE_AFFINITY_MASK
"""


@pytest.mark.row("C: Revision, HF_TOKEN, offline, cache variables")
@pytest.mark.parametrize("name", TGI_VARIABLES.split())
def test_every_variable_of_tgi_has_a_row(name: str) -> None:
    assert name in VARIABLES


@pytest.mark.parametrize("variable", VARIABLES.values(), ids=lambda variable: variable.name)
def test_every_row_is_whole(variable: Variable) -> None:
    types = {Kind.TEXT: str, Kind.INT: int, Kind.FLOAT: float, Kind.BOOL: bool, Kind.INTS: tuple}
    assert variable.default is None or type(variable.default) is types[variable.kind]
    assert variable.meaning
    assert "\n" not in variable.meaning
