"""KVCache: the key and value memory of all layers. Knows shapes and pages, not who reads them or whose a block is."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVCache:
    """One key and one value tensor per layer, in the layout of the backend that made them. Block 0 is scratch."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    num_blocks: int
    block_size: int  # tokens

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in (*self.keys, *self.values))


def make_kv_cache(
    num_layers: int,
    key_block: tuple[int, ...],
    value_block: tuple[int, ...],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """KV memory of `num_blocks` blocks per layer. `key_block` and `value_block` are the shapes of one block.

    Every page is written here, so a machine with too little memory fails at start and not while serving, and no slot
    ever holds a stray NaN that a masked product (0 · NaN) would spread.
    """

    def memory(block: tuple[int, ...]) -> torch.Tensor:
        # torch.zeros would take lazily committed pages from calloc; writing the zeros commits them.
        return torch.empty((num_blocks, *block), dtype=dtype, device=device).zero_()

    keys = tuple(memory(key_block) for _ in range(num_layers))
    values = tuple(memory(value_block) for _ in range(num_layers))
    return KVCache(keys, values, num_blocks, block_size)
