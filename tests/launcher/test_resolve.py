"""Every automatic choice: tables of what is given and what comes out."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import pytest

from tgi.errors import StartupError
from tgi.hub import BUNDLED_MODEL
from tgi.launcher.args import LauncherArgs
from tgi.launcher.compute import model_bytes, model_flops_per_token, prefill_bytes_per_token
from tgi.launcher.devices import Devices
from tgi.launcher.resolve import (
    DEFAULT_MODEL,
    ResolvedArgs,
    choose_model,
    resolve,
    resolve_attention,
    resolve_hostname,
    resolve_num_shard,
    resolve_prefix_caching,
    resolve_rope,
    validate,
)
from tgi.model_config import ModelConfig

GIB = 1 << 30
CPU = Devices()
H100 = Devices("cuda", None, 8, "nvidia-h100-80gb-hbm3", 80 * GIB, (9, 0), frozenset({"flashinfer", "flash_attn"}))
BARE_H100 = dataclasses.replace(H100, packages=frozenset())
FLASH_ATTN_A100 = Devices("cuda", None, 1, "nvidia-a100", 40 * GIB, (8, 0), frozenset({"flash_attn"}))
T4 = Devices("cuda", None, 1, "tesla-t4", 15 * GIB, (7, 5), frozenset({"flashinfer", "flash_attn"}))
AMD = Devices("rocm")

LLAMA = ModelConfig(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    rope_theta=500000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    attention_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    eos_ids=(2,),
    bos_id=1,
    torch_dtype="bfloat16",
    quant_method=None,
    sliding_window=None,
    raw=MappingProxyType({}),
)


def model(**changes: Any) -> ModelConfig:
    return dataclasses.replace(LLAMA, **changes)


def resolved(
    args: LauncherArgs | None = None, environment: dict[str, str] | None = None, devices: Devices = CPU, **changes: Any
) -> ResolvedArgs:
    return resolve(args or LauncherArgs(model_id="m"), "m", model(**changes), environment or {}, devices)


@pytest.mark.row("C: num_shard / sharded rules, visible devices")
@pytest.mark.parametrize(
    ("sharded", "num_shard", "visible", "expected"),
    [
        (True, None, 4, 4),
        (True, None, 1, "only found 1 visible devices"),
        (True, None, 0, "only found 0 visible devices"),
        (True, None, None, "only found no visible devices"),
        (True, 2, None, 2),
        (True, 8, 1, 8),
        (True, 1, 8, "`sharded` is true but `num_shard` <= 1"),
        (True, 0, 8, "`sharded` is true but `num_shard` <= 1"),
        (False, 3, 8, 3),
        (False, None, 8, 1),
        (False, 0, 8, "`num_shard` cannot be < 1"),
        (None, None, 4, 4),
        (None, None, 1, 1),
        (None, None, 0, 1),
        (None, None, None, 1),
        (None, 2, None, 2),
        (None, 1, 8, 1),
        (None, 0, 8, "`num_shard` cannot be < 1"),
    ],
)
def test_shard_count(sharded: bool | None, num_shard: int | None, visible: int | None, expected: int | str) -> None:
    devices = Devices(visible=visible)
    if isinstance(expected, int):
        assert resolve_num_shard(sharded, num_shard, devices) == expected
        return
    with pytest.raises(StartupError, match=expected):
        resolve_num_shard(sharded, num_shard, devices)


def test_more_shards_than_gpus_are_refused() -> None:
    assert resolve_num_shard(None, 8, H100) == 8
    with pytest.raises(StartupError, match=r"^not enough cuda devices: 9 shards need a GPU each, this machine has 8"):
        resolve_num_shard(None, 9, H100)


@pytest.mark.row("C: Attention and prefix-caching resolution")
@pytest.mark.parametrize(
    ("environment", "changes", "devices", "expected"),
    [
        ({}, {}, CPU, "flashdecoding-ipex"),
        ({"ATTENTION": "cpu"}, {}, CPU, "flashdecoding-ipex"),
        ({"ATTENTION": "flashdecoding-ipex"}, {}, CPU, "flashdecoding-ipex"),
        ({"ATTENTION": "torch"}, {}, CPU, "torch"),
        ({"ATTENTION": ""}, {}, CPU, "flashdecoding-ipex"),
        ({}, {"head_dim": 80}, CPU, "flashdecoding-ipex"),
        ({}, {}, H100, "flashinfer"),
        ({}, {"head_dim": 64}, H100, "flashinfer"),
        ({}, {"head_dim": 256}, H100, "flashinfer"),
        ({}, {"head_dim": 80}, H100, "flashdecoding"),
        ({}, {"model_type": "falcon"}, H100, "flashdecoding"),
        ({}, {"model_type": "deepseek_v2"}, H100, "flashdecoding"),
        ({}, {}, FLASH_ATTN_A100, "flashdecoding"),
        ({}, {}, BARE_H100, "paged"),
        ({}, {}, T4, "flashinfer"),
        ({}, {"head_dim": 80}, T4, "paged"),
        ({}, {"head_dim": 80}, dataclasses.replace(H100, compute_capability=None), "paged"),
        ({}, {}, AMD, "paged"),
        ({"ATTENTION": "paged"}, {}, H100, "paged"),
        ({"ATTENTION": "flashdecoding"}, {}, H100, "flashdecoding"),
        ({"ATTENTION": "torch"}, {}, H100, "torch"),
        ({"ATTENTION": "flashinfer"}, {}, CPU, "ATTENTION=flashinfer needs a GPU, this machine serves on cpu"),
        ({"ATTENTION": "paged"}, {}, CPU, "ATTENTION=paged needs a GPU"),
        ({"ATTENTION": "flashdecoding-ipex"}, {}, H100, "ATTENTION=flashdecoding-ipex needs a CPU shard"),
        ({"ATTENTION": "flashinfer"}, {}, BARE_H100, "ATTENTION=flashinfer needs the package flashinfer-python"),
        ({"ATTENTION": "flashdecoding"}, {}, BARE_H100, "ATTENTION=flashdecoding needs the package flash-attn"),
        ({"ATTENTION": "fast"}, {}, CPU, "ATTENTION=fast is not an attention backend"),
    ],
)
def test_attention(environment: dict[str, str], changes: dict[str, Any], devices: Devices, expected: str) -> None:
    if expected.startswith("ATTENTION="):
        with pytest.raises(StartupError, match=expected):
            resolve_attention(environment, model(**changes), devices)
    else:
        assert resolve_attention(environment, model(**changes), devices) == expected


@pytest.mark.parametrize(
    ("environment", "changes", "expected"),
    [
        ({}, {}, True),
        ({}, {"head_dim": 80}, True),
        ({}, {"model_type": "falcon"}, True),
        ({}, {"raw": {"vision_config": {}}}, False),
        ({}, {"raw": {"is_encoder_decoder": True}}, False),
        ({}, {"raw": {"is_encoder_decoder": False}}, True),
        ({"PREFIX_CACHING": "0"}, {}, False),
        ({"PREFIX_CACHING": "false"}, {}, False),
        ({"PREFIX_CACHING": "true"}, {"raw": {"vision_config": {}}}, True),
        ({"PREFIX_CACHING": ""}, {}, True),
    ],
)
def test_prefix_caching(environment: dict[str, str], changes: dict[str, Any], expected: bool) -> None:
    assert resolve_prefix_caching(environment, model(**changes)) is expected


@pytest.mark.row("C: Rope scaling flags")
@pytest.mark.parametrize(
    ("scaling", "factor", "expected"),
    [
        (None, None, None),
        ("dynamic", None, ("dynamic", 1.0)),
        ("dynamic", 2.0, ("dynamic", 2.0)),
        (None, 2.0, ("linear", 2.0)),
    ],
)
def test_rope(scaling: str | None, factor: float | None, expected: tuple[str, float] | None) -> None:
    assert resolve_rope(scaling, factor) == expected


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::", "::1", "10.1.2.3"])
def test_an_address_is_a_hostname(address: str) -> None:
    assert resolve_hostname(address) == (address, None)


@pytest.mark.parametrize("name", ["my-pod-7f9c", "localhost", "300.1.1.1", ""])
def test_a_machine_name_is_no_hostname(name: str) -> None:
    address, warning = resolve_hostname(name)
    assert address == "0.0.0.0"
    assert warning is not None
    assert warning.startswith("Invalid hostname, defaulting to 0.0.0.0")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation_workers": 0}, "`validation_workers` must be > 0"),
        ({"max_input_tokens": 10, "max_input_length": 10}, "are the same: give only one"),
        ({"max_input_tokens": 10, "max_total_tokens": 10}, "`max_input_tokens` must be < `max_total_tokens`"),
        ({"max_input_length": 11, "max_total_tokens": 10}, "`max_input_tokens` must be < `max_total_tokens`"),
        (
            {"max_total_tokens": 11, "max_batch_total_tokens": 10},
            "`max_total_tokens` must be <= `max_batch_total_tokens`",
        ),
        (
            {"max_batch_prefill_tokens": 11, "max_batch_total_tokens": 10},
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`",
        ),
        ({"cuda_memory_fraction": 0.0}, "`cuda_memory_fraction` must be > 0 and <= 1"),
        ({"cuda_memory_fraction": 1.5}, "`cuda_memory_fraction` must be > 0 and <= 1"),
        ({"api_key": ""}, "`api_key` is empty"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=r"^Invalid argument: ") as raised:
        validate(LauncherArgs(**fields))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_input_tokens": 9, "max_total_tokens": 10, "max_batch_total_tokens": 10},
        {"max_batch_prefill_tokens": 10, "max_batch_total_tokens": 10},
        {"max_input_tokens": 10},
    ],
)
def test_what_agrees_is_accepted(fields: dict[str, Any]) -> None:
    validate(LauncherArgs(**fields))


@pytest.mark.parametrize(
    ("model_id", "devices", "installed", "expected"),
    [
        ("some/model", CPU, True, "some/model"),
        (None, CPU, True, BUNDLED_MODEL),
        (None, CPU, False, DEFAULT_MODEL),
        (None, H100, True, DEFAULT_MODEL),
        (None, AMD, True, DEFAULT_MODEL),
    ],
)
def test_model(model_id: str | None, devices: Devices, installed: bool, expected: str) -> None:
    assert choose_model(LauncherArgs(model_id=model_id), devices, installed) == expected


def test_input_length_is_an_alias() -> None:
    assert resolved(LauncherArgs(max_input_length=7, max_total_tokens=9)).args.max_input_tokens == 7
    assert resolved(LauncherArgs()).args.max_input_tokens is None


@pytest.mark.row("C: Derived max_input/total/prefill/batch tokens")
def test_prefill_tokens() -> None:
    assert resolved(max_position_embeddings=8192).args.max_batch_prefill_tokens == 4096
    assert resolved(max_position_embeddings=512).args.max_batch_prefill_tokens == 512
    assert resolved(LauncherArgs(max_batch_prefill_tokens=7)).args.max_batch_prefill_tokens == 7
    assert resolved(LauncherArgs(max_batch_total_tokens=1000)).args.max_batch_prefill_tokens == 1000
    assert "Default `max_batch_prefill_tokens` to 4096" in resolved().notes
    assert resolved(LauncherArgs(max_batch_prefill_tokens=7)).notes == ()


def test_wiggle_room_and_memory_fraction_bound_the_prefill() -> None:
    wide = resolved(devices=H100).args.max_batch_prefill_tokens
    narrow = resolved(LauncherArgs(cuda_memory_fraction=0.3), devices=H100).args.max_batch_prefill_tokens
    tight = resolved(environment={"TGI_WIGGLE_ROOM": "0.3"}, devices=H100).args.max_batch_prefill_tokens
    # The card's speed allows 60,000; the memory beside 16 GB of weights: 0.3 × 0.95 and 0.3 of 80 GiB.
    assert wide == int(900e12 / model_flops_per_token(LLAMA))
    assert narrow == int((0.3 * 0.95 * 80 * GIB - model_bytes(LLAMA)) / prefill_bytes_per_token(LLAMA))
    assert tight == int((0.3 * 80 * GIB - model_bytes(LLAMA)) / prefill_bytes_per_token(LLAMA))
    for value in ("0", "1", "1.5", "-1"):
        with pytest.raises(StartupError, match="TGI_WIGGLE_ROOM must be between 0 and 1"):
            resolved(environment={"TGI_WIGGLE_ROOM": value})
    with pytest.raises(StartupError, match="Invalid value 'much' in the environment variable TGI_WIGGLE_ROOM"):
        resolved(environment={"TGI_WIGGLE_ROOM": "much"})


@pytest.mark.row("C: CUDA graph sizes")
@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ((1, 2, 4, 8, 16, 32), H100, (1, 2, 4, 8, 16, 32)),
        ((0,), H100, ()),
        ((8, 0, 2, 8), H100, (2, 8)),
        ((1, 2, 4), CPU, ()),
    ],
)
def test_cuda_graphs(sizes: tuple[int, ...], devices: Devices, expected: tuple[int, ...]) -> None:
    assert resolved(LauncherArgs(cuda_graphs=sizes), devices=devices).cuda_graphs == expected


@pytest.mark.parametrize(
    ("environment", "devices", "expected"),
    [
        ({}, H100, "1-nvidia-h100-80gb-hbm3"),
        ({}, CPU, None),
        ({"COMPUTE_TYPE": "mine"}, H100, "mine"),
        ({"COMPUTE_TYPE": "mine"}, CPU, "mine"),
    ],
)
def test_compute_type(environment: dict[str, str], devices: Devices, expected: str | None) -> None:
    assert resolved(environment=environment, devices=devices).compute_type == expected


def test_compute_type_counts_the_shards() -> None:
    assert resolved(LauncherArgs(num_shard=4), devices=H100).compute_type == "4-nvidia-h100-80gb-hbm3"


def test_quantised_weights_are_refused_by_name() -> None:
    with pytest.raises(StartupError, match=r"^The weights of m are quantised \(gptq\), which is not served yet\."):
        resolved(quant_method="gptq")


def test_resolving_twice_gives_the_same_and_changes_nothing() -> None:
    args = LauncherArgs(model_id="m", hostname="pod-1", max_input_length=5)
    before = dataclasses.asdict(args)
    first = resolve(args, "m", LLAMA, {"HOSTNAME": "pod-1"}, CPU)
    assert first == resolve(args, "m", LLAMA, {"HOSTNAME": "pod-1"}, CPU)
    assert dataclasses.asdict(args) == before
    assert first.args.hostname == "0.0.0.0"
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.num_shard = 2  # pyright: ignore[reportAttributeAccessIssue]
