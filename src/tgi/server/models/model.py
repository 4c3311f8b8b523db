"""What the engine asks of a model. An architecture is one file beside this one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from tgi.server.context import CacheShape, ForwardContext


class CausalLM(Protocol):
    cache_shape: CacheShape
    vocab_size: int
    weight_bytes: int  # of the parameters that this rank holds

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


@runtime_checkable
class RowKeeper(Protocol):
    """A model that keeps what it has read of a row itself, beside the KV cache or instead of it. Prefixes cannot be
    shared between its rows. A step that starts before the end of what was read takes the rest as not read (rule 3)."""

    can_chunk: bool  # a prompt may be read in pieces
    requires_padding: bool  # TGI's word for models without paged attention
    scores_prompts: bool  # the logits of a prompt's tokens score the ones after them

    def allocate(self, num_rows: int) -> None:
        """Memory for rows 0 … num_rows - 1; what was there is given up first."""
        ...

    def begin(self, row: int, given: npt.NDArray[np.uint32]) -> None:
        """A request begins in the row, with these ids."""
        ...

    def forget(self, row: int) -> None:
        """The row's request has ended."""
        ...
