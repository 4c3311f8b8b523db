"""Moves this rank's part of a tensor from a checkpoint into its parameter. Knows no layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tgi.errors import StartupError
from tgi.server.weights.region import Region, bounds_of

if TYPE_CHECKING:
    from tgi.server.weights.checkpoint import Checkpoint

# Read and converted at once. Small enough to stay in a core's cache between the steps of a dequantisation, and the
# bound of what loading needs beside the parameters.
CHUNK_ELEMENTS = 1 << 18
# To a GPU, where a copy has a price of its own. One H200 and 16 cores, bfloat16 from memory, GB/s with 1, 4 and 16
# chunks at once: 2.7, 6.1 and 5.0; with the smaller chunks 2.4, 3.0 and 1.8, as threads wait for the interpreter.
CHUNK_ELEMENTS_TO_GPU = 1 << 20
CHUNKS_AT_ONCE = 4


def load_into(
    destination: torch.Tensor, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], region: Region = ()
) -> None:
    """Fills `destination` with the `region` of tensor `name`, converted to its dtype and on its device.

    `shape` is the whole tensor's. Raises StartupError when the checkpoint has no such tensor, one of another shape, or
    numbers that are none or that the destination's dtype cannot hold.
    """
    bounds = bounds_of(shape, region)
    assert tuple(destination.shape) == tuple(stop - start for start, stop in bounds), (name, destination.shape, bounds)
    (first, last), *inner = bounds
    row_elements = max(1, math.prod(stop - start for start, stop in inner))
    rows = max(1, (CHUNK_ELEMENTS_TO_GPU if destination.is_cuda else CHUNK_ELEMENTS) // row_elements)

    @torch.inference_mode(torch.is_inference_mode_enabled())  # each thread has its own mode
    def load(start: int) -> None:
        stop = min(start + rows, last)
        part = checkpoint.read(name, shape, (slice(start, stop), *(slice(*bound) for bound in inner)))
        _check_numbers(part, name, destination.dtype)
        destination[start - first : stop - first].copy_(part)

    starts = range(first, last, rows)
    with _one_thread_an_operation() as threads:
        for start in starts[:1]:
            load(start)  # alone: it opens the file
        if threads == 1 or len(starts) <= 2:
            for start in starts[1:]:
                load(start)
        else:
            with ThreadPoolExecutor(min(threads, CHUNKS_AT_ONCE)) as pool:
                for _ in pool.map(load, starts[1:]):
                    pass


def check_shape_of(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Raises StartupError as `load_into` would for the tensor as a whole, before any memory is taken for it: a
    configuration may ask for more than there is."""
    checkpoint.read(name, shape, (slice(0, 0),))


@contextmanager
def _one_thread_an_operation() -> Iterator[int]:
    """How many threads there are for chunks. One chunk is too small to share: where other processes want the cores too,
    threads would wait for each other after every one of its many operations, for longer than the whole chunk takes one
    of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _check_numbers(part: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """One broken weight makes every answer nonsense, and no request can tell why."""
    if not part.is_cpu or not part.is_floating_point() or not part.numel():
        return  # random weights are made on the device, which nobody waits for here
    limit = torch.finfo(dtype).max
    # No number is further from zero than all of them together: one quick pass, which settles it for whole models.
    if torch.linalg.vector_norm(part).item() <= limit:
        return
    least, most = (bound.item() for bound in torch.aminmax(part))
    if not (math.isfinite(least) and math.isfinite(most)):
        raise StartupError(f"The weights of {name} hold values that are no finite numbers; fetch the model again")
    if max(-least, most) > limit:
        kind = str(dtype).removeprefix("torch.")
        raise StartupError(
            f"The weights of {name} reach {max(-least, most):g}, which {kind} cannot hold; choose --dtype bfloat16 or "
            "float32"
        )
