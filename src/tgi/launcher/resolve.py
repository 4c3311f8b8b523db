"""Every automatic choice that is made before a process starts, as one pure function. Reads no file, asks no device."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tgi import env, hub
from tgi.errors import StartupError
from tgi.launcher.args import LauncherArgs
from tgi.launcher.compute import default_prefill_tokens
from tgi.launcher.devices import Devices
from tgi.model_config import ModelConfig

DEFAULT_MODEL = "bigscience/bloom-560m"
DEFAULT_HOSTNAME = "0.0.0.0"
WIGGLE_ROOM = 0.95

FLASHINFER, FLASHDECODING, PAGED, ON_CPU, REFERENCE = (
    "flashinfer",
    "flashdecoding",
    "paged",
    "flashdecoding-ipex",
    "torch",
)
ATTENTION_ALIASES = {"cpu": ON_CPU}
# Backend -> (kinds of device, package that brings it), in the order of preference.
ATTENTION_BACKENDS: dict[str, tuple[tuple[str, ...], str | None]] = {
    FLASHINFER: (("cuda",), "flashinfer"),
    FLASHDECODING: (("cuda",), "flash_attn"),
    PAGED: (("cuda", "rocm"), None),
    ON_CPU: (("cpu",), None),
    REFERENCE: (("cuda", "rocm", "cpu"), None),  # plain torch: for tests and comparisons, never chosen
}
PACKAGE_NAMES = {"flashinfer": "flashinfer-python", "flash_attn": "flash-attn"}
# Head sizes and model types for which flashinfer and its like have kernels that are known to be right.
FAST_HEAD_SIZES = frozenset({64, 128, 256})
SLOW_MODEL_TYPES = frozenset({"falcon", "RefinedWeb", "RefinedWebModel", "deepseek_v2"})


@dataclass(frozen=True, slots=True)
class ResolvedArgs:
    """All that the commands of the children are made from. `args` has hostname, max_input_tokens and
    max_batch_prefill_tokens filled in; `notes` are lines for the log."""

    args: LauncherArgs
    model_id: str
    num_shard: int
    attention: str
    prefix_caching: bool
    cuda_graphs: tuple[int, ...]  # largest last; empty without a GPU
    rope: tuple[str, float] | None
    compute_type: str | None
    notes: tuple[str, ...] = ()


def choose_model(args: LauncherArgs, devices: Devices, bundled_installed: bool) -> str:
    """`--model-id`; without it the bundled model where it can run at once, else TGI's default."""
    if args.model_id is not None:
        return args.model_id
    return hub.BUNDLED_MODEL if bundled_installed and devices.kind == "cpu" else DEFAULT_MODEL


def validate(args: LauncherArgs) -> None:
    """What is wrong whatever the model and the machine. Raises StartupError with TGI's texts."""
    if args.validation_workers == 0:
        raise _invalid("`validation_workers` must be > 0")
    if args.max_input_tokens is not None and args.max_input_length is not None:
        raise _invalid("`max_input_tokens` and `max_input_length` are the same: give only one of them")
    max_input_tokens = _max_input_tokens(args)
    if max_input_tokens is not None and args.max_total_tokens is not None and max_input_tokens >= args.max_total_tokens:
        raise _invalid(
            f"`max_input_tokens` must be < `max_total_tokens`. Given: {max_input_tokens} and {args.max_total_tokens}"
        )
    if args.max_batch_total_tokens is not None:
        for name, value in (
            ("max_batch_prefill_tokens", args.max_batch_prefill_tokens),
            ("max_total_tokens", args.max_total_tokens),
        ):
            if value is not None and value > args.max_batch_total_tokens:
                raise _invalid(
                    f"`{name}` must be <= `max_batch_total_tokens`. Given: {value} and {args.max_batch_total_tokens}"
                )
    for name in ("hung_after", "health_timeout"):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            raise _invalid(f"`{name}` must be > 0. Given: {value}")
    if args.api_key == "":
        raise _invalid("`api_key` is empty: give a key, or leave --api-key out to serve without one")
    if not 0 < args.cuda_memory_fraction <= 1:
        raise _invalid(f"`cuda_memory_fraction` must be > 0 and <= 1. Given: {args.cuda_memory_fraction}")


def resolve(
    args: LauncherArgs,
    model_id: str,
    model: ModelConfig,
    environment: Mapping[str, str],
    devices: Devices,
) -> ResolvedArgs:
    """Raises StartupError when what was asked for contradicts itself, the model or the machine."""
    validate(args)
    if model.quant_method is not None:
        raise StartupError(
            f"The weights of {model_id} are quantised ({model.quant_method}), which is not served yet. "
            "Choose an unquantised or a GGUF version of the model"
        )
    notes: list[str] = []
    num_shard = resolve_num_shard(args.sharded, args.num_shard, devices)
    attention = resolve_attention(environment, model, devices)
    prefill_tokens = args.max_batch_prefill_tokens
    if prefill_tokens is None:
        fraction = args.cuda_memory_fraction * wiggle_room(environment)
        prefill_tokens, warning = default_prefill_tokens(model, devices.card, devices.memory, num_shard, fraction)
        prefill_tokens = min(prefill_tokens, args.max_batch_total_tokens or prefill_tokens)
        notes.append(f"Default `max_batch_prefill_tokens` to {prefill_tokens}")
        notes.extend([warning] if warning else [])
    hostname, warning = resolve_hostname(args.hostname)
    notes.extend([warning] if warning else [])
    settled = dataclasses.replace(
        args,
        hostname=hostname,
        max_input_tokens=_max_input_tokens(args),
        max_batch_prefill_tokens=prefill_tokens,
    )
    on_gpu = devices.kind != "cpu"
    return ResolvedArgs(
        args=settled,
        model_id=model_id,
        num_shard=num_shard,
        attention=attention,
        prefix_caching=resolve_prefix_caching(environment, model),
        cuda_graphs=tuple(sorted({size for size in args.cuda_graphs if size > 0})) if on_gpu else (),
        rope=resolve_rope(args.rope_scaling, args.rope_factor),
        compute_type=env.get("COMPUTE_TYPE", environment) or (f"{num_shard}-{devices.card}" if devices.card else None),
        notes=tuple(notes),
    )


def resolve_num_shard(sharded: bool | None, num_shard: int | None, devices: Devices) -> int:
    """How many shards: what was asked for, else one per visible device."""
    if sharded is True:
        if num_shard is None:
            if devices.visible is None or devices.visible <= 1:
                found = devices.visible if devices.visible is not None else "no"
                raise StartupError(
                    f"not enough cuda devices: `sharded` is true but only found {found} visible devices. "
                    "Set CUDA_VISIBLE_DEVICES or --num-shard"
                )
            num_shard = devices.visible
        elif num_shard <= 1:
            raise _invalid("`sharded` is true but `num_shard` <= 1")
    elif num_shard is None:
        num_shard = 1 if sharded is False else max(devices.visible or 1, 1)
    if num_shard < 1:
        raise _invalid("`num_shard` cannot be < 1")
    if devices.kind == "cuda" and num_shard > devices.num_gpus:
        raise StartupError(
            f"not enough cuda devices: {num_shard} shards need a GPU each, this machine has {devices.num_gpus}. "
            "Lower --num-shard"
        )
    return num_shard


def resolve_attention(environment: Mapping[str, str], model: ModelConfig, devices: Devices) -> str:
    """The backend that ATTENTION asks for, refused when this machine lacks it; else the best that it has."""
    asked = env.get("ATTENTION", environment)
    if asked is not None:
        return _asked_attention(asked, devices)
    preferred = FLASHINFER
    if model.head_dim not in FAST_HEAD_SIZES or model.model_type in SLOW_MODEL_TYPES:
        major = devices.compute_capability[0] if devices.compute_capability else 0
        preferred = FLASHDECODING if major >= 8 else PAGED
    order = list(ATTENTION_BACKENDS)
    for name in order[order.index(preferred) :]:
        kinds, package = ATTENTION_BACKENDS[name]
        if devices.kind in kinds and (package is None or package in devices.packages):
            return name
    raise AssertionError(f"no attention backend for {devices.kind}")


def resolve_prefix_caching(environment: Mapping[str, str], model: ModelConfig) -> bool:
    """PREFIX_CACHING, else on wherever a prefix can be shared: with every backend, for decoder-only text models."""
    asked = env.get("PREFIX_CACHING", environment)
    if asked is not None:
        return asked
    return "vision_config" not in model.raw and model.raw.get("is_encoder_decoder") is not True


def resolve_rope(scaling: str | None, factor: float | None) -> tuple[str, float] | None:
    """(scaling, factor) to hand to the shards; a factor alone means linear, a scaling alone changes nothing."""
    if scaling is None and factor is None:
        return None
    return scaling or "linear", factor if factor is not None else 1.0


def resolve_hostname(hostname: str) -> tuple[str, str | None]:
    """(address, warning). Containers set HOSTNAME to the machine's name, which is no address to listen at."""
    try:
        return str(ipaddress.ip_address(hostname)), None
    except ValueError:
        return DEFAULT_HOSTNAME, f"Invalid hostname, defaulting to {DEFAULT_HOSTNAME} ({hostname!r} is no IP address)"


def wiggle_room(environment: Mapping[str, str]) -> float:
    """TGI_WIGGLE_ROOM, checked."""
    given = env.get("TGI_WIGGLE_ROOM", environment)
    if given is None:
        return WIGGLE_ROOM
    if not 0 < given < 1:
        raise StartupError(f"TGI_WIGGLE_ROOM must be between 0 and 1, not {given}")
    return given


def _asked_attention(asked: str, devices: Devices) -> str:
    name = ATTENTION_ALIASES.get(asked, asked)
    if name not in ATTENTION_BACKENDS:
        known = ", ".join([*ATTENTION_BACKENDS, *ATTENTION_ALIASES])
        raise StartupError(f"ATTENTION={asked} is not an attention backend ({known}). Unset it for the best one")
    kinds, package = ATTENTION_BACKENDS[name]
    if devices.kind not in kinds:
        needed = "a CPU shard" if kinds == ("cpu",) else "a GPU"
        raise StartupError(f"ATTENTION={asked} needs {needed}, this machine serves on {devices.kind}. Unset ATTENTION")
    if package is not None and package not in devices.packages:
        raise StartupError(
            f"ATTENTION={asked} needs the package {PACKAGE_NAMES[package]}. "
            f"Install it (pip install {PACKAGE_NAMES[package]}) or unset ATTENTION"
        )
    return name


def _max_input_tokens(args: LauncherArgs) -> int | None:
    return args.max_input_tokens if args.max_input_tokens is not None else args.max_input_length


def _invalid(message: str) -> StartupError:
    return StartupError(f"Invalid argument: {message}")
