"""Moves this rank's part of a tensor from a checkpoint into its parameter. Knows no layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tgi.server.weights.region import Region, bounds_of

if TYPE_CHECKING:
    from tgi.server.weights.checkpoint import Checkpoint

# Read and converted at once. Small enough to stay in a core's cache between the steps of a dequantisation, and the
# bound of what loading needs beside the parameters.
CHUNK_ELEMENTS = 1 << 18


def load_into(
    destination: torch.Tensor, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], region: Region = ()
) -> None:
    """Fills `destination` with the `region` of tensor `name`, converted to its dtype and on its device.

    `shape` is the whole tensor's. Raises StartupError when the checkpoint has no such tensor or one of another shape.
    """
    bounds = bounds_of(shape, region)
    assert tuple(destination.shape) == tuple(stop - start for start, stop in bounds), (name, destination.shape, bounds)
    (first, last), *inner = bounds
    row_elements = max(1, math.prod(stop - start for start, stop in inner))
    rows = max(1, CHUNK_ELEMENTS // row_elements)
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        part = checkpoint.read(name, shape, (slice(start, stop), *(slice(*bound) for bound in inner)))
        destination[start - first : stop - first].copy_(part)
