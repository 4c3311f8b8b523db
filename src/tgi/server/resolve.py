"""Flags, environment and machine -> ShardConfig: every automatic choice of `serve`, once. Builds nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tgi import env
from tgi.enums import Dtype
from tgi.errors import StartupError
from tgi.server.attention.select import select_backend
from tgi.server.config import ShardConfig
from tgi.server.platforms.platform import Platform

DEFAULT_WIGGLE_ROOM = 0.90
MAX_SOCKET_PATH = 107  # bytes, of sockaddr_un on Linux


@dataclass(frozen=True, slots=True)
class ServeArgs:
    """The command line of `serve`, as typed."""

    model_id: str
    revision: str | None = None
    sharded: bool = False
    quantize: str | None = None
    speculate: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    trust_remote_code: bool = False
    uds_path: str = "/tmp/text-generation-server"
    otlp_endpoint: str | None = None
    otlp_service_name: str = "text-generation-inference.server"
    max_input_tokens: int | None = None
    load_format: str = "auto"
    hung_after: float = 30.0
    budget_scale: float = 1.0
    model_plugins: str | None = None


def resolve(
    args: ServeArgs, model_path: Path, platform: Platform, source: Mapping[str, str] | None = None
) -> ShardConfig:
    """Pure but for reading the environment through `source`. Raises StartupError naming the flag or variable."""
    for flag, value in (
        ("--quantize", args.quantize),
        ("--speculate", args.speculate or None),
        ("--kv-cache-dtype", args.kv_cache_dtype),
    ):
        if value is not None:
            raise StartupError(f"{flag} {value} is not supported yet; leave it out")
    rank, world_size = _ranks(args.sharded, source)
    uds_path = args.uds_path.removeprefix("unix://")
    socket = f"{uds_path}-{rank}"
    if len(socket.encode()) > MAX_SOCKET_PATH:
        raise StartupError(
            f"The socket path {socket} is longer than {MAX_SOCKET_PATH} bytes; choose a shorter --uds-path"
        )
    wiggle_room = env.get("TGI_WIGGLE_ROOM", source)
    if wiggle_room is None:
        wiggle_room = DEFAULT_WIGGLE_ROOM
    if not 0 < wiggle_room < 1:
        raise StartupError(f"TGI_WIGGLE_ROOM must be between 0 and 1, both exclusive; it is {wiggle_room}")
    gamma, delta = env.get("WATERMARK_GAMMA", source), env.get("WATERMARK_DELTA", source)
    if not 0 < gamma < 1:
        raise StartupError(f"WATERMARK_GAMMA must be between 0 and 1, both exclusive; it is {gamma}")
    if not math.isfinite(delta):
        raise StartupError(f"WATERMARK_DELTA must be a finite number; it is {delta}")
    max_total_tokens = env.get("MAX_TOTAL_TOKENS", source)
    if max_total_tokens is not None and max_total_tokens < 1:
        raise StartupError(f"MAX_TOTAL_TOKENS must be at least 1; it is {max_total_tokens}")
    backend = select_backend(env.get("ATTENTION", source), platform.device_type)
    prefix_caching = env.get("PREFIX_CACHING", source)
    if args.load_format not in ("auto", "dummy"):
        raise StartupError(f"--load-format {args.load_format} is not known: choose auto or dummy")
    if not 0 < args.hung_after < math.inf:
        raise StartupError(f"--hung-after must be a number of seconds above 0; it is {args.hung_after}")
    if not 0.05 < args.budget_scale <= 1:
        raise StartupError(f"--budget-scale must be above 0.05 and at most 1; it is {args.budget_scale}")
    return ShardConfig(
        model_id=args.model_id,
        model_path=model_path,
        rank=rank,
        world_size=world_size,
        master_addr=env.get("MASTER_ADDR", source),
        master_port=env.get("MASTER_PORT", source),
        uds_path=uds_path,
        dtype=_dtype(args.dtype, platform),
        device=f"cuda:{rank}" if platform.device_type == "cuda" else platform.device_type,
        attention=backend.name,
        block_size=backend.block_size,
        prefix_caching=True if prefix_caching is None else prefix_caching,
        prefill_chunking=env.get("PREFILL_CHUNKING", source),
        prompt_logprobs=env.get("REQUEST_LOGPROBS", source),
        watermark_gamma=gamma,
        watermark_delta=delta,
        wiggle_room=wiggle_room,
        cuda_memory_fraction=env.get("CUDA_MEMORY_FRACTION", source),
        max_batch_size=env.get("MAX_BATCH_SIZE", source),
        max_total_tokens=max_total_tokens,
        rope=_rope(source),
        load_format=args.load_format,
        hung_after=args.hung_after,
        budget_scale=args.budget_scale,
        model_plugins=None if args.model_plugins is None else Path(args.model_plugins),
        otlp_endpoint=args.otlp_endpoint,
        otlp_service_name=args.otlp_service_name,
    )


def _rope(source: Mapping[str, str] | None) -> tuple[str, float] | None:
    """Kind and factor of ROPE_SCALING and ROPE_FACTOR; a factor alone means linear."""
    kind, factor = env.get("ROPE_SCALING", source), env.get("ROPE_FACTOR", source)
    if kind is None and factor is None:
        return None
    if kind not in (None, "linear", "dynamic"):
        raise StartupError(f"ROPE_SCALING must be linear or dynamic; it is {kind}")
    if factor is not None and not 1 <= factor < math.inf:
        raise StartupError(f"ROPE_FACTOR must be at least 1; it is {factor}")
    return kind or "linear", 1.0 if factor is None else factor


def _ranks(sharded: bool, source: Mapping[str, str] | None) -> tuple[int, int]:
    if not sharded:
        return 0, 1
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not env.is_set(name, source)]
    if missing:
        raise StartupError(f"--sharded needs the environment variables {', '.join(missing)}")
    rank, world_size = env.get("RANK", source), env.get("WORLD_SIZE", source)
    if not 0 <= rank < world_size:
        raise StartupError(f"RANK {rank} must be at least 0 and below WORLD_SIZE {world_size}")
    return rank, world_size


def _dtype(asked: str | None, platform: Platform) -> Dtype:
    if asked is None:
        return platform.default_dtype
    try:
        return Dtype(asked)
    except ValueError:
        raise StartupError(f"--dtype {asked} is not known: choose {', '.join(Dtype)}") from None
