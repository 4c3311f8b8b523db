"""Which platform this process runs on. Asked once at start; knows no model."""

from __future__ import annotations

import torch

from tgi.errors import StartupError
from tgi.server.platforms import cpu, cuda
from tgi.server.platforms.platform import Platform


def detect() -> Platform:
    """CUDA when torch sees a device, else the CPU."""
    return cuda.platform() if torch.cuda.is_available() else cpu.platform()


def platform_of(device: torch.device | str) -> Platform:
    """The platform that owns `device`, whatever else the machine has."""
    device_type = torch.device(device).type
    if device_type == "cpu":
        return cpu.platform()
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise StartupError("no CUDA device is visible to torch; start without --device cuda, or check the driver")
        return cuda.platform()
    raise StartupError(f"device type {device_type!r} is not supported; cpu and cuda are")
