"""CpuBackend (`flashdecoding-ipex`): paged attention by our CPU kernels. Plans items, owns layout and scratch.

Keys [blocks, kv_heads, head_dim, 64], values [blocks, kv_heads, 64, value_dim rounded up to 16].
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from tgi.server.attention.backend import AttentionInputs
from tgi.server.attention.kv_cache import KVCache, make_kv_cache
from tgi.server.context import AttentionOption
from tgi.server.kernels.cpu import attention as attend
from tgi.server.kernels.cpu import paged_write as write
from tgi.server.kernels.cpu.parallel import NEXT_ITEM, NEXT_THREAD, NUM_ITEMS, max_threads, run
from tgi.server.kernels.cpu.vector import BFLOAT16, FLOAT16, FLOAT32, LANES

BLOCK_SIZE = attend.BLOCK
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# Rows of scores (queries times heads of a group) in one item of a prefill: the products reuse a loaded key for each.
_TILE_ROWS = 24
# Multiply-adds below which waking a second thread costs more than it saves.
_ALONE_BELOW = 60_000
# What changes from layer to layer: words QUERY to VALUE_DIM, and KEY to VALUE_DIM. A float takes the lower half of
# its word.
_ATTEND_CALL = struct.Struct("<8qf4xqf4x3q")
_WRITE_CALL = struct.Struct("<10q")


class CpuBackend:
    def __init__(self, name: str = "flashdecoding-ipex", block_size: int = BLOCK_SIZE) -> None:
        self.name = name
        self.block_size = block_size
        self._buffers: dict[str, torch.Tensor] = {}

    def make_cache(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        value_dim: int | None = None,
    ) -> KVCache:
        key_block = (num_kv_heads, head_dim, self.block_size)
        value_block = (num_kv_heads, self.block_size, _padded(value_dim or head_dim))
        return make_kv_cache(num_layers, key_block, value_block, num_blocks, self.block_size, dtype, device)

    def bytes_per_block(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> int:
        dims = head_dim + _padded(value_dim or head_dim)
        return num_layers * num_kv_heads * self.block_size * dims * dtype.itemsize

    def lacks(self, options: frozenset[AttentionOption]) -> frozenset[AttentionOption]:
        return frozenset()

    def plan(self, inputs: AttentionInputs, cache: KVCache, num_heads: int) -> CpuStep:
        _, num_kv_heads, head_dim, _ = cache.keys[0].shape
        group = num_heads // num_kv_heads
        tile = max(1, _TILE_ROWS // group)
        items, work, num_parts = _plan_items(inputs.query_lens, inputs.context_lens, tile)
        padded_dim = cache.values[0].shape[3]
        scratch_stride = attend.scratch_bytes(tile, group, head_dim, padded_dim)
        scratch = self._buffer("scratch", max_threads() * scratch_stride, torch.uint8)
        partials = self._buffer(
            "partials", num_parts * num_kv_heads * attend.partial_floats(group, padded_dim), torch.float32
        )
        counters = self._buffer("counters", num_parts * num_kv_heads, torch.int64)
        return CpuStep(
            inputs,
            cache,
            items,
            group,
            scratch,
            scratch_stride,
            partials,
            counters,
            alone=work * num_heads * head_dim * 2 < _ALONE_BELOW,
        )

    def warmup(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Compile both workers (or read them from numba's cache). They serve every shape and dtype."""
        attend.attention_worker()
        write.write_worker()

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed at creation, kept from step to step: one thread runs one step at a time."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.zeros(max(size, 1), dtype=dtype)
        return buffer


class CpuStep:
    """One step. Its arguments are written once, here; each layer changes the first few words."""

    def __init__(
        self,
        inputs: AttentionInputs,
        cache: KVCache,
        items: np.ndarray,
        group: int,
        scratch: torch.Tensor,
        scratch_stride: int,
        partials: torch.Tensor,
        counters: torch.Tensor,
        alone: bool,
    ) -> None:
        _, num_kv_heads, head_dim, _ = cache.keys[0].shape
        table = inputs.block_tables.contiguous()
        slots = inputs.slots.contiguous()
        # The kernels check no bounds.
        assert table.dtype == torch.int32, "block tables are int32"
        assert slots.dtype == torch.int64, "slots are int64"
        assert max(inputs.context_lens, default=0) <= table.shape[1] * cache.block_size, "a row has too few blocks"
        self._cache = cache
        self._cache_kind = _KINDS[cache.dtype]
        self._attend_alone = alone
        self._num_scratches = scratch.numel() // scratch_stride
        self._write_alone = len(slots) <= 4 * write.TOKENS
        # The kernels hold addresses; these keep what is there alive.
        self._alive = (table, slots, items, scratch, partials, counters)
        self._attend = np.zeros(attend.NUM_ARGUMENTS, np.int64)
        self._write = np.zeros(write.NUM_ARGUMENTS, np.int64)

        self._attend_address, self._write_address = self._attend.ctypes.data, self._write.ctypes.data
        self._attend_worker, self._write_worker = attend.attention_worker(), write.write_worker()

        words = self._attend
        words[NUM_ITEMS] = len(items) * num_kv_heads
        words[attend.TABLE] = table.data_ptr()
        words[attend.TABLE_STRIDE] = table.shape[1]
        words[attend.ITEMS] = items.ctypes.data
        words[attend.NUM_KV_HEADS] = num_kv_heads
        words[attend.GROUP] = group
        words[attend.HEAD_DIM] = head_dim
        words[attend.PADDED_DIM] = cache.values[0].shape[3]
        words[attend.SCRATCH] = scratch.data_ptr()
        words[attend.SCRATCH_STRIDE] = scratch_stride
        words[attend.PARTIALS] = partials.data_ptr()
        words[attend.COUNTERS] = counters.data_ptr()

        words = self._write
        words[NUM_ITEMS] = -(-len(slots) // write.TOKENS) * num_kv_heads
        words[write.CACHE_KIND] = self._cache_kind
        words[write.SLOTS] = slots.data_ptr()
        words[write.NUM_TOKENS] = len(slots)
        words[write.NUM_KV_HEADS] = num_kv_heads
        words[write.HEAD_DIM] = head_dim
        words[write.PADDED_DIM] = cache.values[0].shape[3]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
        keys, values = self._cache.keys[layer].data_ptr(), self._cache.values[layer].data_ptr()
        kind = _KINDS[query.dtype]
        value_dim = value.shape[2]

        self._write[NEXT_ITEM] = 0
        _WRITE_CALL.pack_into(
            self._write.data, 8 * write.KEY,
            key.data_ptr(), *key.stride()[:2], value.data_ptr(), *value.stride()[:2], kind, keys, values, value_dim,
        )  # fmt: skip
        run(self._write_worker, self._write_address, self._write_alone)

        out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype)
        if sinks is not None:
            sinks = sinks.float().contiguous()
        if alibi is not None:
            alibi = alibi.float().contiguous()
        self._attend[NEXT_ITEM] = self._attend[NEXT_THREAD] = 0
        _ATTEND_CALL.pack_into(
            self._attend.data, 8 * attend.QUERY,
            query.data_ptr(), *query.stride()[:2], kind, out.data_ptr(), keys, values, self._cache_kind,
            scale, window or 0, softcap or 0.0, 0 if sinks is None else sinks.data_ptr(),
            0 if alibi is None else alibi.data_ptr(), value_dim,
        )  # fmt: skip
        run(self._attend_worker, self._attend_address, self._attend_alone, self._num_scratches)
        return out


def _padded(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES


def _plan_items(query_lens: list[int], context_lens: list[int], tile: int) -> tuple[np.ndarray, int, int]:
    """Items of a step, costliest first; keys seen in all; number of parts of the rows that are cut into parts."""
    queries = np.asarray(query_lens, np.int64)
    contexts = np.asarray(context_lens, np.int64)
    firsts = np.cumsum(queries) - queries
    parts = np.where((queries == 1) & (contexts > attend.PART), -(-contexts // attend.PART), 0)
    counts = np.where(parts > 0, parts, -(-queries // tile))  # items of each row

    row = np.repeat(np.arange(len(queries)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the item among its row's
    is_part = parts[row] > 0
    begin = np.where(is_part, 0, index * tile)  # first query of the item
    items = np.zeros((len(row), attend.ITEM_WORDS), np.int32)
    items[:, attend.ROW] = row
    items[:, attend.FIRST_TOKEN] = firsts[row] + begin
    items[:, attend.NUM_QUERIES] = np.minimum(tile, queries[row] - begin)
    items[:, attend.FIRST_POSITION] = contexts[row] - queries[row] + begin
    items[:, attend.ITEM_PART] = np.where(is_part, index, -1)
    items[:, attend.NUM_PARTS] = parts[row]
    items[:, attend.FIRST_PARTIAL] = (np.cumsum(parts) - parts)[row]
    last = items[:, attend.FIRST_POSITION] + items[:, attend.NUM_QUERIES]
    cost = items[:, attend.NUM_QUERIES] * np.where(is_part, attend.PART, last)
    return items[np.argsort(-cost, kind="stable")], int(cost.sum()), int(parts.sum())
