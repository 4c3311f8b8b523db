"""What a layer may ask about the step that runs, and what a model says of its attention before the first.

Built by the engine; models pass it on without looking inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

# What a model's attention may need beyond plain causal attention. A backend names those that it lacks.
AttentionOption = Literal["window", "softcap", "sinks", "alibi", "value_dim"]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """KV memory of one layer on this rank, the same for all layers, and what their attention asks of a backend."""

    num_layers: int
    num_kv_heads: int  # of this rank
    num_heads: int  # of this rank
    head_dim: int  # of queries and keys
    value_dim: int  # of values; the same in nearly every model
    options: frozenset[AttentionOption] = frozenset()
    # What the model keeps itself, beside the KV cache or (no layers) instead of it: bytes per token, and per row.
    token_bytes: int = 0
    row_bytes: int = 0
    max_positions: int | None = None  # tokens of the longest row, where positions are learned and so come to an end


class AttentionStep(Protocol):
    """This step's attention: backend, plan and KV cache behind one call."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, heads, head_dim]
        key: torch.Tensor,  # [tokens, kv_heads, head_dim], written to the cache first
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        scale: float,
        window: int | None = None,  # tokens seen to the left, the own one included
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,  # [heads]
        alibi: torch.Tensor | None = None,  # [heads] float32: added to a score per position of distance to its key
    ) -> torch.Tensor: ...  # [tokens, heads, value_dim]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Whose tokens a step has, in their order. For models that keep something by row."""

    rows: list[int]
    starts: list[int]  # position of each row's first token in the step
    query_lens: list[int]  # tokens
    prompt_lens: list[int]  # of the request, whatever of it is in the step

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(row, start, prompt_len)"""
        return zip(self.rows, self.starts, self.prompt_lens)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    attention: AttentionStep
    rows: StepRows | None = None  # for models that keep something by row
