"""Random weights for every name asked for (`load_format="dummy"`): speed without files. Made on the device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection

import torch

from tgi.server.weights.region import Region, bounds_of

STD = 0.02
HALF_WIDTH = STD * 3**0.5  # a uniform distribution of that deviation: bounded, and quicker than a normal one
# All values there are: a tensor takes them in turn, from a place that its name chooses. Drawing each anew would take
# minutes for a large model. Prime, so that no two rows of a matrix begin at the same place.
NUM_VALUES = 4_194_319


class DummyCheckpoint:
    """A tensor depends on its name and whole shape alone, so every rank cuts its part from the same values."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        values = torch.empty(NUM_VALUES, dtype=dtype, device=device)
        self._values = values.uniform_(-HALF_WIDTH, HALF_WIDTH, generator=torch.Generator(device).manual_seed(0))

    def names(self) -> Collection[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        (first, last), *inner = bounds_of(shape, region)
        row_elements = math.prod(shape[1:])
        rows = (last - first, *shape[1:])
        if name.endswith("norm.weight"):
            tensor = torch.ones(rows, dtype=self.dtype, device=self.device)
        else:
            start = zlib.crc32(name.encode()) + first * row_elements
            tensor = self._run(start % NUM_VALUES, math.prod(rows)).view(rows)
        return tensor[(slice(None), *(slice(*bound) for bound in inner))]

    def close(self) -> None:
        pass

    def _run(self, start: int, count: int) -> torch.Tensor:
        """`count` values from `start` on, around and around."""
        turns, stop = divmod(start + count, NUM_VALUES)
        if not turns:
            return self._values[start:stop]
        return torch.cat((self._values[start:], *[self._values] * (turns - 1), self._values[:stop]))
