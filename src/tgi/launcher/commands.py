"""Arguments and environment of the processes that the launcher starts: download, shard, router. Starts nothing.

The API key is in one place only, the router's environment: command lines can be read by every user of a machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tgi import env, hub
from tgi.errors import StartupError
from tgi.launcher.args import FLAGS, LauncherArgs
from tgi.launcher.process import Command
from tgi.launcher.resolve import ResolvedArgs
from tgi.observability.logging import finest_level

SERVER, ROUTER = "text-generation-server", "text-generation-router"
# Fields that the router takes under the launcher's own name, where they have a value.
ROUTER_OPTIONS = (
    "max_concurrent_requests",
    "max_best_of",
    "max_stop_sequences",
    "max_top_n_tokens",
    "max_client_batch_size",
    "max_input_tokens",
    "max_total_tokens",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_batch_size",
    "host_cache_bytes",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "queue_timeout",
    "validation_workers",
    "payload_limit",
    "hostname",
    "port",
    "tokenizer_config_path",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "revision",
)
ROUTER_SWITCHES = ("disable_grammar_support", "json_output", "kserve")
# Mirrors whose value the launcher has read and hands on itself: a child must not read the raw text again.
MIRRORS = frozenset(flag.variable for flag in FLAGS if flag.variable)


def find_program(name: str, environment: Mapping[str, str], beside: Path | None = None) -> str:
    """Path of one of our programs: beside this Python first, so that two installations do not mix."""
    own = (beside or Path(sys.executable).parent) / name
    if os.access(own, os.X_OK) and own.is_file():
        return str(own)
    found = shutil.which(name, path=env.get("PATH", environment))
    if found is None:
        raise StartupError(f"The program {name} is not installed beside {sys.executable} nor on PATH. Reinstall tgi")
    return found


def download_command(
    args: LauncherArgs, model_id: str, environment: Mapping[str, str], beside: Path | None = None
) -> Command:
    argv = [find_program(SERVER, environment, beside), "download-weights", model_id]
    argv += ["--extension", ".safetensors", "--logger-level", "INFO", "--json-output", "--merge-lora"]
    argv += ["--revision", args.revision] if args.revision is not None else []
    argv += ["--trust-remote-code"] if args.trust_remote_code else []
    changes = {**_no_mirrors(), **_hub_variables(args, environment), "LOG_LEVEL": None}
    return Command("download", tuple(argv), env.child_environment(changes, environment))


def shard_command(
    resolved: ResolvedArgs,
    rank: int,
    uds_prefix: str,
    master_port: int,
    environment: Mapping[str, str],
    beside: Path | None = None,
    budget_scale: float = 1.0,
) -> Command:
    """`uds_prefix`: the shard adds its rank. `budget_scale`: of its prefill budget."""
    args = resolved.args
    argv = [find_program(SERVER, environment, beside), "serve", resolved.model_id]
    argv += ["--uds-path", uds_prefix, "--logger-level", finest_level(env.get("LOG_LEVEL", environment))]
    argv += ["--json-output"]
    argv += ["--trust-remote-code"] if args.trust_remote_code else []
    argv += ["--sharded"] if resolved.num_shard > 1 else []
    for name in ("dtype", "revision", "max_input_tokens", "load_format", "model_plugins"):
        value = getattr(args, name)
        argv += [_option(name), str(value)] if value is not None else []
    argv += ["--hung-after", f"{args.hung_after:g}"]
    argv += ["--budget-scale", f"{budget_scale:.6g}"] if budget_scale != 1 else []
    argv += _tracing(args)
    changes: dict[str, str | None] = {
        **_no_mirrors(),
        **_hub_variables(args, environment),
        "LOG_LEVEL": None,  # the option above speaks instead
        "RANK": str(rank),
        "WORLD_SIZE": str(resolved.num_shard),
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": str(master_port),
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "SAFETENSORS_FAST_GPU": "1",
        "CUDA_MEMORY_FRACTION": str(args.cuda_memory_fraction),
        "CUDA_GRAPHS": ",".join(map(str, resolved.cuda_graphs)) or None,
        "ATTENTION": resolved.attention,
        "PREFIX_CACHING": _switch(resolved.prefix_caching),
        "MAX_TOTAL_TOKENS": _number(args.max_total_tokens),
        "MAX_BATCH_SIZE": _number(args.max_batch_size),
        "DISABLE_CUSTOM_KERNELS": "True" if args.disable_custom_kernels else None,
        "ROPE_SCALING": resolved.rope[0] if resolved.rope else None,
        "ROPE_FACTOR": str(resolved.rope[1]) if resolved.rope else None,
    }
    for name in ("watermark_gamma", "watermark_delta"):
        value = getattr(args, name)
        if value is not None:
            changes[name.upper()] = str(value)
    if args.enable_prefill_logprobs:
        changes["REQUEST_LOGPROBS"] = "1"
    return Command(f"shard {rank}", tuple(argv), env.child_environment(changes, environment))


def router_command(
    resolved: ResolvedArgs,
    master_uds_path: Path,
    environment: Mapping[str, str],
    colorize: bool,
    beside: Path | None = None,
) -> Command:
    """`colorize`: whether the launcher's own output is coloured, which the router, writing to a pipe, cannot see."""
    args = resolved.args
    argv = [find_program(ROUTER, environment, beside)]
    argv += ["--tokenizer-name", resolved.model_id, "--master-shard-uds-path", str(master_uds_path)]
    for name in ROUTER_OPTIONS:
        value = getattr(args, name)
        argv += [_option(name), str(value)] if value is not None else []
    for origin in args.cors_allow_origin:
        argv += ["--cors-allow-origin", origin]
    argv += [_option(name) for name in ROUTER_SWITCHES if getattr(args, name)]
    argv += _tracing(args)
    changes: dict[str, str | None] = {
        **_no_mirrors(),
        **_hub_variables(args, environment),
        "API_KEY": args.api_key,
        "ATTENTION": resolved.attention,
        "PREFIX_CACHING": _switch(resolved.prefix_caching),
        "COMPUTE_TYPE": resolved.compute_type,
        "LOG_COLORIZE": _switch(colorize),
    }
    return Command("router", tuple(argv), env.child_environment(changes, environment))


def _tracing(args: LauncherArgs) -> list[str]:
    """Router and shards have the same name in traces, as in TGI."""
    if args.otlp_endpoint is None:
        return []
    return ["--otlp-endpoint", args.otlp_endpoint, "--otlp-service-name", args.otlp_service_name]


def _no_mirrors() -> dict[str, str | None]:
    return dict.fromkeys(MIRRORS)


def _hub_variables(args: LauncherArgs, environment: Mapping[str, str]) -> dict[str, str | None]:
    changes: dict[str, str | None] = {
        "HUGGINGFACE_HUB_CACHE": args.huggingface_hub_cache,
        "WEIGHTS_CACHE_OVERRIDE": args.weights_cache_override,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    token = hub.token(environment)
    if token is not None:
        changes["HF_TOKEN"] = token
    return changes


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(value: int | None) -> str | None:
    return None if value is None else str(value)


def _switch(value: bool) -> str:
    return "1" if value else "0"
