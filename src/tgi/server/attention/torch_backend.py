"""TorchBackend: paged attention in plain torch, on any device and for any block size. The oracle of every kernel test,
and the backend of machines for which no kernel exists. Never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tgi.server.attention.backend import AttentionInputs
from tgi.server.attention.kv_cache import KVCache, make_kv_cache
from tgi.server.context import AttentionOption
from tgi.server.ops.kv_write import kv_write
from tgi.server.ops.paged_attention import Span, paged_attention, plan_spans


class TorchBackend:
    def __init__(self, name: str = "torch", block_size: int = 16) -> None:
        self.name = name
        self.block_size = block_size

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
        key_block = (num_kv_heads, self.block_size, head_dim)
        value_block = (num_kv_heads, self.block_size, value_dim or head_dim)
        return make_kv_cache(num_layers, key_block, value_block, num_blocks, self.block_size, dtype, device)

    def bytes_per_block(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> int:
        dims = head_dim + (value_dim or head_dim)
        return num_layers * num_kv_heads * self.block_size * dims * dtype.itemsize

    def lacks(self, options: frozenset[AttentionOption]) -> frozenset[AttentionOption]:
        return frozenset()

    def plan(self, inputs: AttentionInputs, cache: KVCache, num_heads: int) -> TorchStep:
        _, num_kv_heads, _, head_dim = cache.keys[0].shape
        spans = plan_spans(inputs.query_lens, inputs.context_lens, num_kv_heads * head_dim)
        return TorchStep(cache, inputs.block_tables, inputs.context_lens_device, inputs.slots, spans)

    def warmup(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Nothing to compile."""


@dataclass(frozen=True, slots=True)
class TorchStep:
    cache: KVCache
    block_tables: torch.Tensor  # [rows, max_blocks] int32
    context_lens: torch.Tensor  # [rows] int32
    slots: torch.Tensor  # [tokens] int64
    spans: Sequence[Span]

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
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        kv_write(keys, values, key, value, self.slots)
        return paged_attention(
            query, keys, values, self.block_tables, self.context_lens, self.spans, scale, window, softcap, sinks, alibi
        )
