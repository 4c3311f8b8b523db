"""Arguments and environment of the children, against TGI's habits."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.test_resolve import H100, model
from tgi.errors import StartupError
from tgi.launcher.args import FLAGS, LauncherArgs
from tgi.launcher.commands import (
    ROUTER_OPTIONS,
    ROUTER_SWITCHES,
    download_command,
    find_program,
    router_command,
    shard_command,
)
from tgi.launcher.devices import Devices
from tgi.launcher.resolve import ResolvedArgs, resolve
from tgi.router.cli import FLAGS as ROUTER_FLAGS
from tgi.server.cli import download_weights, serve

HOST_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LOG_LEVEL": "debug", "HOME": "/root"}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name in ("text-generation-server", "text-generation-router"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def resolved(devices: Devices | None = None, **fields: Any) -> ResolvedArgs:
    args = LauncherArgs(model_id="m", **fields)
    return resolve(args, "m", model(), {}, devices or Devices())


def test_plain_shard(programs: Path) -> None:
    command = shard_command(resolved(), 0, "/tmp/x/shard", 29500, HOST_ENVIRONMENT, programs)
    assert command.name == "shard 0"
    assert command.argv == (
        str(programs / "text-generation-server"),
        *("serve", "m", "--uds-path", "/tmp/x/shard", "--logger-level", "DEBUG", "--json-output"),
        *("--hung-after", "30"),
    )
    assert command.environment == {
        "PATH": "/usr/bin:/bin",
        "HOME": "/root",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "SAFETENSORS_FAST_GPU": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "CUDA_MEMORY_FRACTION": "1.0",
        "ATTENTION": "flashdecoding-ipex",
        "PREFIX_CACHING": "1",
    }


def test_shard_with_everything(programs: Path) -> None:
    args = resolved(
        H100,
        num_shard=2,
        dtype="bfloat16",
        revision="refs/pr/1",
        trust_remote_code=True,
        max_input_tokens=100,
        max_total_tokens=200,
        max_batch_size=8,
        cuda_graphs=(4, 1),
        cuda_memory_fraction=0.5,
        disable_custom_kernels=True,
        enable_prefill_logprobs=True,
        watermark_gamma=0.25,
        watermark_delta=1.5,
        rope_factor=2.0,
        master_addr="10.0.0.1",
        huggingface_hub_cache="/data",
        weights_cache_override="/weights",
        hung_after=2.5,
        model_plugins="/plugins",
    )
    environment = {**HOST_ENVIRONMENT, "HF_API_TOKEN": "hf_1", "HF_TOKEN": "hf_2", "PREFILL_CHUNKING": "0"}
    command = shard_command(args, 1, "/tmp/x/shard", 29501, environment, programs, budget_scale=0.9 * 0.9)
    assert command.argv[1:] == (
        *("serve", "m", "--uds-path", "/tmp/x/shard", "--logger-level", "DEBUG", "--json-output"),
        *("--trust-remote-code", "--sharded", "--dtype", "bfloat16", "--revision", "refs/pr/1"),
        *("--max-input-tokens", "100", "--model-plugins", "/plugins"),
        *("--hung-after", "2.5", "--budget-scale", "0.81"),
    )
    expected = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
        "MAX_TOTAL_TOKENS": "200",
        "MAX_BATCH_SIZE": "8",
        "CUDA_GRAPHS": "1,4",
        "CUDA_MEMORY_FRACTION": "0.5",
        "DISABLE_CUSTOM_KERNELS": "True",
        "REQUEST_LOGPROBS": "1",
        "WATERMARK_GAMMA": "0.25",
        "WATERMARK_DELTA": "1.5",
        "ROPE_SCALING": "linear",
        "ROPE_FACTOR": "2.0",
        "HUGGINGFACE_HUB_CACHE": "/data",
        "WEIGHTS_CACHE_OVERRIDE": "/weights",
        "HF_TOKEN": "hf_1",
        "ATTENTION": "flashinfer",
        "PREFILL_CHUNKING": "0",
    }
    assert {name: command.environment.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("info", "INFO"),
        ("warn", "WARNING"),
        ("error", "ERROR"),
        ("trace", "TRACE"),
        ("", "INFO"),
        ("warn,text_generation_launcher=debug", "DEBUG"),
    ],
)
def test_log_level_of_a_shard(programs: Path, level: str, expected: str) -> None:
    command = shard_command(resolved(), 0, "/tmp/s", 1, {**HOST_ENVIRONMENT, "LOG_LEVEL": level}, programs)
    assert command.argv[command.argv.index("--logger-level") + 1] == expected
    assert "LOG_LEVEL" not in command.environment


def test_router(programs: Path) -> None:
    args = resolved(
        port=8080,
        hostname="pod-1",
        max_input_length=7,
        cors_allow_origin=("https://a", "https://b"),
        json_output=True,
        api_key="secret-key",
        max_batch_size=3,
        queue_timeout=2.5,
        revision="main",
        tokenizer_config_path="/t.json",
        chat_template="{{ x }}",
        reasoning_parser="think",
    )
    command = router_command(args, Path("/tmp/x/shard-0"), HOST_ENVIRONMENT, True, programs)
    assert command.argv == (
        str(programs / "text-generation-router"),
        *("--tokenizer-name", "m", "--master-shard-uds-path", "/tmp/x/shard-0"),
        *("--max-concurrent-requests", "128", "--max-best-of", "2", "--max-stop-sequences", "4"),
        *("--max-top-n-tokens", "5", "--max-client-batch-size", "4", "--max-input-tokens", "7"),
        *("--max-batch-prefill-tokens", "4096", "--max-batch-size", "3", "--waiting-served-ratio", "0.3"),
        *(
            "--max-waiting-tokens",
            "20",
            "--queue-timeout",
            "2.5",
            "--validation-workers",
            "2",
            "--payload-limit",
            "2000000",
        ),
        *("--hostname", "0.0.0.0", "--port", "8080", "--tokenizer-config-path", "/t.json"),
        *("--chat-template", "{{ x }}", "--tool-call-parser", "auto", "--reasoning-parser", "think"),
        *("--revision", "main"),
        *("--cors-allow-origin", "https://a", "--cors-allow-origin", "https://b", "--json-output"),
    )
    assert command.environment["API_KEY"] == "secret-key"
    assert command.environment["LOG_COLORIZE"] == "1"
    assert command.environment["LOG_LEVEL"] == "debug"
    assert "secret-key" not in repr(command)


def test_no_child_reads_a_mirror_again(programs: Path) -> None:
    """What the launcher has read, corrected or refused must not reach a child by the back door."""
    mirrors = {flag.variable: "from-outside" for flag in FLAGS if flag.variable}
    environment = {**HOST_ENVIRONMENT, **mirrors}
    for command in (
        shard_command(resolved(), 0, "/tmp/s", 1, environment, programs),
        router_command(resolved(), Path("/tmp/s-0"), environment, False, programs),
        download_command(LauncherArgs(), "m", environment, programs),
    ):
        assert "from-outside" not in command.environment.values(), command.name


@pytest.mark.row("B: KServe v2 routes")
def test_kserve_reaches_the_router(programs: Path) -> None:
    assert "--kserve" in router_command(resolved(kserve=True), Path("/s-0"), {}, False, programs).argv
    assert "--kserve" not in router_command(resolved(), Path("/s-0"), {}, False, programs).argv


def test_only_the_router_gets_the_key(programs: Path) -> None:
    environment = {**HOST_ENVIRONMENT, "API_KEY": "secret-key"}
    args = resolved(api_key="secret-key")
    shard = shard_command(args, 0, "/tmp/s", 1, environment, programs)
    download = download_command(args.args, "m", environment, programs)
    router = router_command(args, Path("/tmp/s-0"), environment, False, programs)
    assert "secret-key" not in [*shard.environment.values(), *download.environment.values()]
    assert not any("secret-key" in argument for command in (shard, download, router) for argument in command.argv)


def test_compute_type_reaches_the_router(programs: Path) -> None:
    command = router_command(resolved(H100), Path("/tmp/s-0"), HOST_ENVIRONMENT, False, programs)
    assert command.environment["COMPUTE_TYPE"] == "1-nvidia-h100-80gb-hbm3"
    assert "COMPUTE_TYPE" not in router_command(resolved(), Path("/s-0"), {}, False, programs).environment


def test_random_weights_are_the_shards_matter(programs: Path) -> None:
    command = shard_command(resolved(load_format="dummy"), 0, "/tmp/s", 1, {}, programs)
    assert command.argv[command.argv.index("--load-format") + 1] == "dummy"
    assert "--load-format" not in shard_command(resolved(), 0, "/tmp/s", 1, {}, programs).argv


def test_download(programs: Path) -> None:
    args = LauncherArgs(revision="v1", trust_remote_code=True)
    command = download_command(args, "org/model", HOST_ENVIRONMENT, programs)
    assert command.argv == (
        str(programs / "text-generation-server"),
        *("download-weights", "org/model", "--extension", ".safetensors", "--logger-level", "INFO", "--json-output"),
        *("--merge-lora", "--revision", "v1", "--trust-remote-code"),
    )


def test_the_programs_know_these_options() -> None:
    """Written here since no program may import another: the options that the launcher writes and those they read."""
    router = {flag.field for flag in ROUTER_FLAGS}
    assert {*ROUTER_OPTIONS, *ROUTER_SWITCHES, "tokenizer_name", "master_shard_uds_path", "cors_allow_origin"} <= router
    shard = inspect.signature(serve).parameters.keys()
    assert {
        *("model_id", "uds_path", "logger_level", "json_output", "trust_remote_code", "sharded", "dtype", "revision"),
        *("max_input_tokens", "model_plugins"),
    } <= shard
    download = inspect.signature(download_weights).parameters.keys()
    assert {"model_id", "extension", "logger_level", "json_output", "revision", "trust_remote_code"} <= download


def test_programs_are_found_beside_this_python_first(tmp_path: Path, programs: Path) -> None:
    name = "text-generation-server"
    other = tmp_path / "other"
    other.mkdir()
    (other / name).write_text("#!/bin/sh\n")
    (other / name).chmod(0o755)
    assert find_program(name, {"PATH": str(other)}, programs) == str(programs / name)
    (programs / name).chmod(0o644)
    assert find_program(name, {"PATH": str(other)}, programs) == str(other / name)
    with pytest.raises(StartupError, match=f"^The program {name} is not installed beside"):
        find_program(name, {"PATH": "/nowhere"}, programs)


@pytest.mark.row("F: OTLP traces, traceparent")
def test_traces_reach_router_and_shards_under_one_name(programs: Path) -> None:
    args = resolved(otlp_endpoint="http://collector:4317", otlp_service_name="mine")
    shard = shard_command(args, 0, "/tmp/s", 1, HOST_ENVIRONMENT, programs)
    router = router_command(args, Path("/s-0"), HOST_ENVIRONMENT, True, programs)
    for command in (shard, router):
        text = " ".join(command.argv)
        assert "--otlp-endpoint http://collector:4317 --otlp-service-name mine" in text
        assert "OTLP_ENDPOINT" not in command.environment
    without = resolved(otlp_service_name="mine")
    assert not any("otlp" in word for word in router_command(without, Path("/s-0"), {}, True, programs).argv)
