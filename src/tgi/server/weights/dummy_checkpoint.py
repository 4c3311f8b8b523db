"""Random weights for every name asked for (`load_format="dummy"`): speed without files. Made on the device."""

from __future__ import annotations

import zlib
from collections.abc import Collection

import torch

from tgi.server.weights.region import Region, bounds_of

STD = 0.02
HALF_WIDTH = STD * 3**0.5  # a uniform distribution of that deviation: bounded, and quicker than a normal one


class DummyCheckpoint:
    """A tensor depends on its name and whole shape alone, so every rank cuts its part from the same values."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def names(self) -> Collection[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        bounds = tuple(slice(start, stop) for start, stop in bounds_of(shape, region))
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=self.device)[bounds]
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return tensor.uniform_(-HALF_WIDTH, HALF_WIDTH, generator=generator)[bounds]

    def close(self) -> None:
        pass
