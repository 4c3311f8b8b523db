"""HostBlocks: room in host memory for blocks of the KV cache, and the copies there and back. Knows not whose they are.

A block lies here in one piece, all layers together, so that it crosses the bus as one copy; on the device it is
gathered from the layers, or scattered to them, by a launch or two per layer for many blocks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tgi.errors import StartupError
from tgi.server.attention.kv_cache import KVCache
from tgi.shard_client.messages import BlockMoves

STAGING_BYTES = 64 << 20  # on the device, at most, but for a single block that is larger
WORD = torch.int64  # blocks are copied as what they are: bits, eight bytes at a time where they divide


class Run(NamedTuple):
    """Copies in one direction that need no order among themselves: no source of a run is one of its targets."""

    to_host: bool
    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]


class HostBlocks:
    """All copies are queued behind what the device was given before, and what comes later waits for them (rule 1)."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        """Every page is written here, and pinned beside a GPU. Raises StartupError where that cannot be."""
        layers = [layer for pair in zip(cache.keys, cache.values) for layer in pair]
        word = WORD if all(_block_bytes(layer) % WORD.itemsize == 0 for layer in layers) else torch.uint8
        self._layers = [layer.view(cache.num_blocks, -1).view(word) for layer in layers]
        widths = [layer.shape[1] for layer in self._layers]
        ends = np.cumsum(widths).tolist()
        self._columns = [slice(end - width, end) for end, width in zip(ends, widths)]
        size = ends[-1]
        self._blocks = torch.empty((num_blocks, size), dtype=word).zero_()
        if cache.device.type == "cuda":
            self._pin()
        most = max(1, STAGING_BYTES // (size * word.itemsize))
        self._staging = torch.empty((min(most, num_blocks), size), dtype=word, device=cache.device)

    def _pin(self) -> None:
        # Not torch's own pinned memory: its allocator rounds up to a power of two.
        runtime: Any = torch.cuda.cudart()
        address = self._blocks.data_ptr()
        if int(runtime.cudaHostRegister(address, self._blocks.nbytes, 0)):
            raise StartupError(
                f"{self._blocks.nbytes} bytes of host memory cannot be locked for --host-cache-bytes; lower it"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, address)

    @torch.inference_mode()
    def copy(self, moves: BlockMoves) -> None:
        """Queue the copies, in their order. The caller has checked the numbers."""
        most = len(self._staging)
        for run in split_runs(moves):
            copy = self._take_out if run.to_host else self._bring_back
            for begin in range(0, len(run.sources), most):
                copy(run.sources[begin : begin + most], run.targets[begin : begin + most])

    def _take_out(self, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        staged, index = self._staged(blocks)
        for layer, column in zip(self._layers, self._columns):
            staged[:, column].copy_(layer.index_select(0, index))
        for offset, slot, count in stretches(slots):
            self._blocks[slot : slot + count].copy_(staged[offset : offset + count], non_blocking=True)

    def _bring_back(self, slots: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        staged, index = self._staged(blocks)
        for offset, slot, count in stretches(slots):
            staged[offset : offset + count].copy_(self._blocks[slot : slot + count], non_blocking=True)
        for layer, column in zip(self._layers, self._columns):
            layer.index_copy_(0, index, staged[:, column])

    def _staged(self, blocks: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.from_numpy(blocks)
        if self._staging.is_cuda:
            index = index.pin_memory().to(self._staging.device, non_blocking=True)
        return self._staging[: len(blocks)], index


def split_runs(moves: BlockMoves) -> Iterator[Run]:
    """The moves in as few runs as their order allows. Of several into one target, with no change of direction between
    them, only the last counts: nobody reads what the others left."""
    to_host = np.frombuffer(moves.to_host, np.uint8)
    sources = np.frombuffer(moves.sources, np.uint32).astype(np.int64)
    targets = np.frombuffer(moves.targets, np.uint32).astype(np.int64)
    borders = [0, *(np.flatnonzero(np.diff(to_host)) + 1).tolist(), len(to_host)]
    for begin, end in itertools.pairwise(borders):
        if begin == end:
            continue
        _, last = np.unique(targets[begin:end][::-1], return_index=True)
        kept = np.sort(end - 1 - last)
        yield Run(bool(to_host[begin]), sources[kept], targets[kept])


def stretches(slots: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """(offset, first slot, how many) of each stretch of neighbours."""
    borders = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    for begin, end in itertools.pairwise(borders):
        yield begin, int(slots[begin]), end - begin


def staging_bytes(bytes_per_block: int) -> int:
    """Device memory that the copies need, at most."""
    return max(STAGING_BYTES, bytes_per_block)


def _block_bytes(layer: torch.Tensor) -> int:
    return layer[0].numel() * layer.element_size()
