"""Op kv_write: this step's keys and values go to their slots in the paged cache. Signature and torch reference.

Layout of the reference: [blocks, kv_heads, block, dim]; keys and values may differ in the last.
"""

from __future__ import annotations

import torch


def kv_write(
    key_cache: torch.Tensor,  # [blocks, kv_heads, block, head_dim]
    value_cache: torch.Tensor,  # [blocks, kv_heads, block, value_dim]
    key: torch.Tensor,  # [tokens, kv_heads, head_dim], any strides
    value: torch.Tensor,  # [tokens, kv_heads, value_dim]
    slots: torch.Tensor,  # [tokens] int64: block * block_size + offset
) -> None:
    """Write in place. Padding tokens share slot 0, in the scratch block: which of them wins does not matter."""
    block_size = key_cache.shape[2]
    blocks = slots // block_size
    offsets = slots % block_size
    # Two index tensors around a slice put the indexed axis first: [tokens, kv_heads, dim].
    key_cache[blocks, :, offsets] = key.to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value.to(value_cache.dtype)
