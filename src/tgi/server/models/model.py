"""What the engine asks of a model. An architecture is one file beside this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tgi.server.context import ForwardContext


@dataclass(frozen=True, slots=True)
class CacheShape:
    """KV heads of one layer on this rank."""

    num_layers: int
    num_kv_heads: int  # of this rank
    num_heads: int  # of this rank
    head_dim: int


class CausalLM(Protocol):
    cache_shape: CacheShape
    vocab_size: int

    def forward(
        self,
        input_ids: torch.Tensor,  # [tokens] int64, rows one after the other
        positions: torch.Tensor,  # [tokens] int64
        context: ForwardContext,
    ) -> torch.Tensor: ...  # [tokens, hidden]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32, whole vocabulary on rank 0 (other ranks may return what they
        have)."""
        ...
