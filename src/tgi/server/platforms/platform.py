"""What a machine is and can do, as plain data. Knows not what for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tgi.enums import Dtype


@dataclass(frozen=True, slots=True)
class Platform:
    name: str  # "cpu", "cuda"
    device_type: str  # torch's word
    default_dtype: Dtype  # of a model for which no dtype is asked
    free_memory: Callable[[torch.device], int]  # bytes that may still be taken on this device
    kernels: Mapping[str, str]  # op -> "module:function"; an op that is not listed runs on its torch reference
