"""What a layer may ask about the step that runs. Built by the engine; models pass it on without looking inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class AttentionStep(Protocol):
    """This step's attention: backend, plan and KV cache behind one call."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, heads, head_dim]
        key: torch.Tensor,  # [tokens, kv_heads, head_dim], written to the cache first
        value: torch.Tensor,  # [tokens, kv_heads, head_dim]
        scale: float,
        window: int | None = None,  # tokens seen to the left, the own one included
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,  # [heads]
    ) -> torch.Tensor: ...  # [tokens, heads, head_dim]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    attention: AttentionStep
