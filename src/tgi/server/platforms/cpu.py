"""The CPU platform: its default dtype, its memory (a container's limit included), its kernel table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from tgi.enums import Dtype
from tgi.server.platforms.platform import Platform

KERNELS: Mapping[str, str] = {
    "linear": "tgi.server.kernels.cpu.linear:linear",
    "rms_norm": "tgi.server.kernels.cpu.pointwise:rms_norm",
    "add_rms_norm": "tgi.server.kernels.cpu.pointwise:add_rms_norm",
    "rotate_": "tgi.server.kernels.cpu.pointwise:rotate_",
}
# Without one of these a bfloat16 product is emulated and slower than float32.
BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # the last is Arm's word


def default_dtype(flags: frozenset[str]) -> Dtype:
    return Dtype.BFLOAT16 if flags & BFLOAT16_FLAGS else Dtype.FLOAT32


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Instruction set words of /proc/cpuinfo; empty where it lists none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def free_memory(device: torch.device | None = None, root: Path = Path("/")) -> int:
    """Bytes that this process may still take: what the machine has available, or what its cgroup leaves if less.

    File pages in the cgroup's usage can be dropped at need and do not count (as the kernel's own MemAvailable).
    """
    available = _meminfo(_read(root / "proc/meminfo")).get("MemAvailable", 0)
    left = [available, *_cgroup_left(root)]
    return max(0, min(left))


def _cgroup_left(root: Path) -> list[int]:
    """What each enclosing cgroup with a limit leaves. Version 2 first, then version 1's memory controller."""
    left: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage, file_key = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, usage, file_key = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # A container sees its own group as the mount's root, whatever the path says: look at every level that exists.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            allowed = _read(folder / limit).strip()
            used = _read(folder / usage).strip()
            if allowed.isdigit() and used.isdigit():
                droppable = _stat(_read(folder / "memory.stat")).get(file_key, 0)
                left.append(int(allowed) - int(used) + droppable)
    return left


def _meminfo(text: str) -> dict[str, int]:
    """Bytes by name."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _stat(text: str) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, text.splitlines()) if len(words) == 2}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@cache
def platform() -> Platform:
    return Platform(
        name="cpu",
        device_type="cpu",
        default_dtype=default_dtype(cpu_flags(_read(Path("/proc/cpuinfo")))),
        free_memory=free_memory,
        kernels=KERNELS,
    )
