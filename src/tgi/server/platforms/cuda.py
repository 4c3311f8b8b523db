"""The CUDA platform: its default dtype, its memory, its kernel table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from tgi.enums import Dtype
from tgi.server.platforms.platform import Platform

KERNELS: Mapping[str, str] = {"experts": "tgi.server.kernels.cuda.experts:stacked_experts"}
GROUPED: Mapping[str, str] = {**KERNELS, "experts": "tgi.server.kernels.cuda.experts:grouped_experts"}
GROUPED_ON = (9, 10)  # major compute capabilities that torch has grouped products for
BFLOAT16_SINCE = (8, 0)  # compute capability


def default_dtype(capability: tuple[int, int]) -> Dtype:
    return Dtype.BFLOAT16 if capability >= BFLOAT16_SINCE else Dtype.FLOAT16


def free_memory(device: torch.device) -> int:
    """Bytes the driver has left, and what torch's allocator holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@cache
def platform() -> Platform:
    capability = torch.cuda.get_device_capability()
    return Platform(
        name="cuda",
        device_type="cuda",
        default_dtype=default_dtype(capability),
        free_memory=free_memory,
        kernels=GROUPED if capability[0] in GROUPED_ON else KERNELS,
    )
