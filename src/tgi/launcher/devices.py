"""What this machine offers, asked from nvidia-smi and the environment: visible GPUs, the card, its memory and compute
capability. Never imports torch. Knows nothing of models."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tgi import env

MIB = 1 << 20
NVIDIA_SMI_TIMEOUT_S = 20.0
# Packages that bring an attention backend of their own.
ATTENTION_PACKAGES = ("flashinfer", "flash_attn")

Runner = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True, slots=True)
class Devices:
    """`visible` is TGI's count of visible devices: None when no variable speaks of them. Sizes are bytes."""

    kind: Literal["cuda", "rocm", "cpu"] = "cpu"
    visible: int | None = None
    num_gpus: int = 0  # that nvidia-smi shows and the environment does not hide
    card: str | None = None  # "nvidia-h100-80gb-hbm3"
    memory: int | None = None  # of the first GPU
    compute_capability: tuple[int, int] | None = None
    packages: frozenset[str] = field(default_factory=frozenset)  # of ATTENTION_PACKAGES, those installed


def find_devices(environment: Mapping[str, str], run: Runner | None = None) -> Devices:
    """`run` executes a command and returns its output, None when that fails."""
    hidden = _hides_every_gpu(environment) or _torch_knows_no_gpu()
    installed = None if hidden else _nvidia_rows(run or run_command)
    gpus = installed or []
    first = gpus[0] if gpus else None
    # AMD's driver makes this node; rocm-smi is not everywhere.
    has_amd = not gpus and not hidden and Path("/dev/kfd").exists()
    visible = 0 if hidden else count_visible(environment, None if installed is None else len(installed))
    return Devices(
        kind="cuda" if gpus else "rocm" if has_amd else "cpu",
        visible=visible,
        num_gpus=len(gpus) if visible is None else min(len(gpus), visible),
        card=first[0] if first else None,
        memory=first[1] if first else None,
        compute_capability=first[2] if first else None,
        packages=frozenset(name for name in ATTENTION_PACKAGES if importlib.util.find_spec(name)),
    )


def count_visible(environment: Mapping[str, str], num_installed: int | None) -> int | None:
    """The first of three variables that is set decides; `all` and `void` mean every GPU that nvidia-smi lists
    (`num_installed`, None when there is no nvidia-smi)."""
    cuda = env.get("CUDA_VISIBLE_DEVICES", environment)
    if cuda is not None:
        return len(cuda.split(","))
    nvidia = env.get("NVIDIA_VISIBLE_DEVICES", environment)
    if nvidia in ("all", "void"):
        return num_installed
    if nvidia == "none":
        return 0
    listed = nvidia or env.get("ZE_AFFINITY_MASK", environment)
    return len(listed.split(",")) if listed else None


def run_command(command: Sequence[str]) -> str | None:
    """Output of a short command; None when it is not installed, fails, or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _hides_every_gpu(environment: Mapping[str, str]) -> bool:
    """CUDA itself reads the empty string (and -1) as "no device": here it is not the same as unset."""
    return environment.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1")


def _torch_knows_no_gpu() -> bool:
    """Is the installed torch a CPU build? Its version says so, which costs no import."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _nvidia_rows(run: Runner) -> list[tuple[str, int | None, tuple[int, int] | None]] | None:
    """(card, memory, capability) of each GPU; None when nvidia-smi does not answer."""
    output = run(["nvidia-smi", "--query-gpu=gpu_name,memory.total,compute_cap", "--format=csv,noheader,nounits"])
    if output is None:
        return None
    rows: list[tuple[str, int | None, tuple[int, int] | None]] = []
    for line in filter(None, map(str.strip, output.splitlines())):
        name, memory, capability = ([part.strip() for part in line.split(",")] + ["", ""])[:3]
        rows.append((name.lower().replace(" ", "-"), _mebibytes(memory), _capability(capability)))
    return rows


def _mebibytes(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
