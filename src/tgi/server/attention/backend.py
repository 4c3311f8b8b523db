"""AttentionBackend: paged attention behind five verbs. A backend owns its cache layout; nobody else indexes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tgi.server.attention.kv_cache import KVCache
from tgi.server.context import AttentionOption, AttentionStep


@dataclass(slots=True)
class AttentionInputs:
    """One step's rows, ragged. Decode rows (query_len 1) may stand anywhere. Row i covers the positions
    [context_len[i] - query_len[i], context_len[i]) of its sequence.

    The host columns are for planning without waiting for the device; device columns hold the same numbers.
    """

    query_lens: list[int]  # host [rows]
    context_lens: list[int]  # host [rows], keys visible to the row's last query, this step's included
    cu_seqlens_q: torch.Tensor  # [rows + 1] int32
    context_lens_device: torch.Tensor  # [rows] int32
    block_tables: torch.Tensor  # [rows, max_blocks] int32; behind a row's context: any block
    slots: torch.Tensor  # [tokens] int64: block * block_size + offset; padding writes to block 0


class AttentionBackend(Protocol):
    name: str
    block_size: int  # tokens

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
        """KV memory, touched. Block 0 is scratch. `value_dim` where values are not as wide as keys."""
        ...

    def bytes_per_block(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> int: ...

    def lacks(self, options: frozenset[AttentionOption]) -> frozenset[AttentionOption]:
        """Those of `options` that its kernels do not have."""
        ...

    def plan(self, inputs: AttentionInputs, cache: KVCache, num_heads: int) -> AttentionStep:
        """Everything that is the same for all layers of a step, once. Never waits for the device."""
        ...

    def warmup(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Compile every kernel that serving this shape can need. Called once, before the first step; idempotent."""
        ...
