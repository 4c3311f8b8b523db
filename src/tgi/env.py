"""Every environment variable that a program reads beside the mirrors of its flags: name, type, default, meaning.

The only reader of `os.environ`. A variable that is set to the empty string counts as unset.
Mirrors of the launcher's flags (`--max-batch-size` = `MAX_BATCH_SIZE`) stand in `tgi.launcher.args`; here are only
those that the launcher hands on to its children by environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tgi.errors import StartupError

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})


class Kind(StrEnum):
    """How the text of a variable is read."""

    TEXT = "text"
    INT = "integer"
    FLOAT = "number"
    BOOL = "true or false"
    INTS = "comma list of integers"


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    kind: Kind
    default: Any
    readers: str  # programs, for the reference page; empty: known as TGI's, without effect here (yet)
    meaning: str


def _table(*rows: Variable) -> dict[str, Variable]:
    return {row.name: row for row in rows}


VARIABLES: Mapping[str, Variable] = _table(
    # Choices of the launcher, which a shard started by hand needs too.
    Variable(
        "ATTENTION",
        Kind.TEXT,
        None,
        "launcher, server",
        "attention backend: `flashinfer`, `flashdecoding`, `paged`, `flashdecoding-ipex` (alias `cpu`); chosen by the "
        "launcher when unset",
    ),
    Variable(
        "PREFIX_CACHING",
        Kind.BOOL,
        None,
        "launcher, router, server",
        "share the blocks of common prompt prefixes; chosen by the launcher when unset",
    ),
    Variable("PREFILL_CHUNKING", Kind.BOOL, True, "server", "compute long prompts in chunks beside running answers"),
    Variable(
        "TGI_WIGGLE_ROOM",
        Kind.FLOAT,
        None,
        "launcher, server",
        "usable fraction of the memory (0 to 1, both exclusive); unset: 0.90 in the server, 0.95 in the launcher",
    ),
    Variable("COMPUTE_TYPE", Kind.TEXT, None, "launcher, router", "value of the `x-compute-type` header"),
    # Handed to the shards by the launcher.
    Variable("RANK", Kind.INT, 0, "server", "number of this shard"),
    Variable("WORLD_SIZE", Kind.INT, 1, "server", "number of shards"),
    Variable("MASTER_ADDR", Kind.TEXT, "localhost", "server", "where the shards meet (torch.distributed)"),
    Variable("MASTER_PORT", Kind.INT, 29500, "server", "port at which the shards meet (torch.distributed)"),
    Variable(
        "MAX_TOTAL_TOKENS",
        Kind.INT,
        None,
        "server",
        "prompt and answer tokens that one request may have; rope scalings that go by length are chosen for it",
    ),
    Variable("MAX_BATCH_SIZE", Kind.INT, None, "server", "rows of a batch"),
    Variable("CUDA_GRAPHS", Kind.INTS, (), "server", "decode batch sizes for which a CUDA graph is captured"),
    Variable("CUDA_MEMORY_FRACTION", Kind.FLOAT, 1.0, "server", "fraction of each GPU's memory that may be used"),
    Variable("XPU_MEMORY_FRACTION", Kind.FLOAT, 0.9, "", "the same for Intel GPUs"),
    Variable("ROPE_SCALING", Kind.TEXT, None, "server", "`linear` or `dynamic`: overrides the model's rope scaling"),
    Variable("ROPE_FACTOR", Kind.FLOAT, None, "server", "factor of ROPE_SCALING"),
    Variable("REQUEST_LOGPROBS", Kind.BOOL, True, "server", "answer requests for the logprobs of the prompt"),
    Variable("LORA_ADAPTERS", Kind.TEXT, None, "", "adapters to load, a comma list"),
    Variable("WATERMARK_GAMMA", Kind.FLOAT, 0.5, "server", "share of the vocabulary that a watermark favours"),
    Variable("WATERMARK_DELTA", Kind.FLOAT, 2.0, "server", "by how much a watermark favours it"),
    Variable("DISABLE_CUSTOM_KERNELS", Kind.BOOL, False, "", "TGI: plain kernels for two old architectures"),
    # Devices.
    Variable("CUDA_VISIBLE_DEVICES", Kind.TEXT, None, "launcher", "GPUs to use, a comma list"),
    Variable("NVIDIA_VISIBLE_DEVICES", Kind.TEXT, None, "launcher", "the same, set by containers; `all` = every GPU"),
    Variable("ZE_AFFINITY_MASK", Kind.TEXT, None, "launcher", "Intel GPUs to use, a comma list"),
    Variable("OMP_NUM_THREADS", Kind.INT, None, "server", "threads of a CPU shard"),
    Variable("DEBUG", Kind.BOOL, False, "", "run one of several shards alone, without a process group"),
    # Kernel switches.
    Variable("USE_FLASH_ATTENTION", Kind.BOOL, True, "", "`false`: plain attention instead of the fast kernels"),
    Variable("DISABLE_EXLLAMA", Kind.BOOL, False, "", "do not use exllama kernels for GPTQ"),
    Variable("EXLLAMA_VERSION", Kind.INT, 2, "", "which exllama kernels"),
    Variable("USE_CUTLASS_W8A8", Kind.BOOL, False, "", "cutlass instead of marlin for fp8 on older GPUs"),
    Variable("ROCM_USE_FLASH_ATTN_V2_TRITON", Kind.BOOL, False, "", "AMD: Triton prefill attention"),
    Variable("ROCM_USE_CUSTOM_PAGED_ATTN", Kind.BOOL, True, "", "AMD: custom decode attention"),
    Variable("ROCM_USE_SKINNY_GEMM", Kind.BOOL, True, "", "AMD: matrix products for few rows"),
    Variable("PYTORCH_TUNABLEOP_ENABLED", Kind.BOOL, True, "", "AMD: tune matrix products"),
    Variable("PYTORCH_TUNABLEOP_TUNING", Kind.BOOL, True, "", "AMD: tune while warming up"),
    Variable("PYTORCH_TUNABLEOP_SEQLENS", Kind.INTS, (), "", "AMD: lengths to tune for"),
    Variable("PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP", Kind.BOOL, False, "", "AMD: go on tuning while serving"),
    # Model hub.
    Variable("HF_TOKEN", Kind.TEXT, None, "all", "access token of the model hub"),
    Variable("HUGGING_FACE_HUB_TOKEN", Kind.TEXT, None, "all", "older name of HF_TOKEN"),
    Variable("HF_API_TOKEN", Kind.TEXT, None, "launcher", "handed to the shards as HF_TOKEN"),
    Variable("HF_HOME", Kind.TEXT, None, "all", "folder of the hub's cache (its `hub` subfolder holds models)"),
    Variable("HF_HUB_CACHE", Kind.TEXT, None, "all", "folder that holds the cached models"),
    Variable("HUGGINGFACE_HUB_CACHE", Kind.TEXT, None, "all", "older name of HF_HUB_CACHE"),
    Variable("XDG_CACHE_HOME", Kind.TEXT, None, "all", "where `huggingface/hub` lies when none of the above is set"),
    Variable("HF_ENDPOINT", Kind.TEXT, None, "all", "address of the model hub, where it is a mirror"),
    Variable("HF_HUB_OFFLINE", Kind.BOOL, False, "all", "never ask the hub, use what is on this machine"),
    Variable(
        "HF_HUB_ENABLE_HF_TRANSFER", Kind.BOOL, True, "", "faster downloads; the hub's client now always has them"
    ),
    Variable("HF_HUB_DISABLE_PROGRESS_BARS", Kind.BOOL, False, "all", "no progress bars"),
    Variable("HF_HUB_USER_AGENT_ORIGIN", Kind.TEXT, None, "all", "named to the hub in requests"),
    Variable("HF_KERNELS_CACHE", Kind.TEXT, None, "", "folder of kernels fetched from the hub"),
    Variable("WEIGHTS_CACHE_OVERRIDE", Kind.TEXT, None, "all", "folder that directly holds the model's files"),
    # Tests.
    Variable(
        "TGI_FAULTS",
        Kind.TEXT,
        None,
        "server",
        "for tests only: faults that the model server makes itself, `kind:key=value,…;…`",
    ),
    # Logs.
    Variable("LOG_LEVEL", Kind.TEXT, "info", "launcher, router", "`error`, `warn`, `info`, `debug`, `trace`"),
    Variable("LOG_COLORIZE", Kind.BOOL, None, "launcher, router", "colours in the log; unset: on a terminal only"),
    # Router only.
    Variable("API_KEY", Kind.TEXT, None, "router", "key that clients must send; the launcher hands it on this way"),
    Variable("MAX_IMAGE_FETCH_SIZE", Kind.INT, 1 << 30, "", "largest image that is fetched, bytes"),
    Variable("AIP_HTTP_PORT", Kind.INT, None, "launcher, router", "Vertex AI: port, instead of --port"),
    Variable("AIP_PREDICT_ROUTE", Kind.TEXT, None, "router", "Vertex AI: another path of /vertex"),
    Variable("AIP_HEALTH_ROUTE", Kind.TEXT, None, "router", "Vertex AI: another path of /health"),
    Variable("DOCKER_LABEL", Kind.TEXT, None, "router", "image label shown by /info and in system_fingerprint"),
    Variable("GIT_SHA", Kind.TEXT, None, "router", "commit shown by /info"),
    Variable("PATH", Kind.TEXT, "", "launcher", "where programs are looked for that do not lie beside the launcher"),
)


def get(name: str, source: Mapping[str, str] | None = None) -> Any:
    """Value of the variable `name`, typed by its row; its default when unset or empty. `source` stands in for the
    environment. Raises StartupError when the text does not fit the type, KeyError for a name without a row."""
    variable = VARIABLES[name]
    text = (os.environ if source is None else source).get(name, "").strip()
    return parse(name, variable.kind, text) if text else variable.default


def is_set(name: str, source: Mapping[str, str] | None = None) -> bool:
    """Has somebody given `name` a value that is not empty?"""
    return bool((os.environ if source is None else source).get(name, "").strip())


def snapshot() -> dict[str, str]:
    """The environment as it is now: what a program's parser reads its mirrors from, and resolves its choices with."""
    return dict(os.environ)


def child_environment(changes: Mapping[str, str | None], source: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: ours with `changes`; None takes a variable out."""
    result = dict(os.environ if source is None else source)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def parse(name: str, kind: Kind, text: str) -> Any:
    """Read `text` as `kind`. Raises StartupError naming the variable."""
    try:
        if kind is Kind.INT:
            return int(text)
        if kind is Kind.FLOAT:
            return float(text)
        if kind is Kind.INTS:
            return tuple(int(item) for item in text.split(",") if item.strip())
    except ValueError:
        raise StartupError(f"Invalid value {text!r} in the environment variable {name}: expected {kind}") from None
    if kind is Kind.BOOL:
        if text.lower() in TRUE:
            return True
        if text.lower() in FALSE:
            return False
        raise StartupError(f"Invalid value {text!r} in the environment variable {name}: expected {kind}")
    return text


def set_defaults(values: Mapping[str, str]) -> None:
    """Set variables of this process that nobody has set: for libraries that read the environment as they load."""
    for name, value in values.items():
        if not is_set(name):
            os.environ[name] = value
