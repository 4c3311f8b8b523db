"""What a CPU machine is: instruction sets from cpuinfo, memory from meminfo and any cgroup, under a made-up root."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tgi.enums import Dtype
from tgi.server.ops.dispatch import bind
from tgi.server.platforms import cpu, cuda
from tgi.server.platforms.detect import detect, platform_of

GIB = 1 << 30


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2 avx2 avx512f avx512_bf16", Dtype.BFLOAT16),
        ("fpu avx512f amx_bf16 amx_tile amx_int8", Dtype.BFLOAT16),
        ("fpu sse2 avx2 avx512f avx512_vnni", Dtype.FLOAT32),
        ("", Dtype.FLOAT32),
    ],
)
def test_default_dtype_follows_the_instruction_sets(flags: str, expected: Dtype) -> None:
    cpuinfo = f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\nbugs\t\t: none\n\nprocessor\t: 1\n"
    assert cpu.default_dtype(cpu.cpu_flags(cpuinfo)) is expected


def test_arm_names_its_flags_otherwise() -> None:
    assert cpu.default_dtype(cpu.cpu_flags("processor : 0\nFeatures : fp asimd bf16 i8mm\n")) is Dtype.BFLOAT16
    assert cpu.default_dtype(cpu.cpu_flags("processor : 0\nFeatures : fp asimd\n")) is Dtype.FLOAT32


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), Dtype.BFLOAT16), ((8, 0), Dtype.BFLOAT16), ((7, 5), Dtype.FLOAT16), ((7, 0), Dtype.FLOAT16)],
)
def test_default_dtype_of_a_gpu(capability: tuple[int, int], expected: Dtype) -> None:
    assert cuda.default_dtype(capability) is expected


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = (
    f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1000 kB\nMemAvailable: {16 * GIB // 1024} kB\nHugePages_Total: 0\n"
)


def test_without_a_cgroup_the_machines_available_memory(tmp_path: Path) -> None:
    assert cpu.free_memory(root=write(tmp_path, {"proc/meminfo": MEMINFO})) == 16 * GIB


def test_cgroup_2_limit_less_usage_counts_when_smaller(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        },
    )
    # File pages can be dropped: 4 - 3 + 2.
    assert cpu.free_memory(root=root) == 3 * GIB


def test_an_outer_group_may_be_the_tighter_one(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{1 * GIB}\n",
            "sys/fs/cgroup/pod/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{1 * GIB}\n",
        },
    )
    assert cpu.free_memory(root=root) == GIB


def test_a_container_sees_its_own_group_at_the_mounts_root(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/docker/0123abcd\n",  # a path of the host, not visible here
            "sys/fs/cgroup/memory.max": f"{5 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{1 * GIB}\n",
        },
    )
    assert cpu.free_memory(root=root) == 4 * GIB


def test_cgroup_1(tmp_path: Path) -> None:
    unlimited = 9223372036854771712
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{unlimited}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert cpu.free_memory(root=write(tmp_path, files)) == 16 * GIB
    files["sys/fs/cgroup/memory/box/memory.limit_in_bytes"] = f"{3 * GIB}\n"
    assert cpu.free_memory(root=write(tmp_path, files)) == 2 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        },
    )
    assert cpu.free_memory(root=root) == 0


def test_this_machine() -> None:
    platform = platform_of("cpu")
    assert platform.device_type == "cpu"
    assert 0 < platform.free_memory(torch.device("cpu")) < 1 << 50
    assert detect().device_type in ("cpu", "cuda")


def test_every_kernel_of_the_table_exists() -> None:
    bind(cpu.KERNELS)
    bind(cuda.KERNELS)
