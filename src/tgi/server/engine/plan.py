"""Pure: which rows the next step computes, and how much of each. Knows no tensors and no device.

A row has `remaining` tokens to compute before its next id can be chosen: one while it decodes, many while its prompt is
read. A step takes all rows with one token left first (decode), then prompts by priority and admission under the budget;
but the oldest of them comes second at the latest, so that no stream of more urgent ones keeps it from being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tgi.server.padding import padded_tokens


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """Tokens that one step may compute."""

    alone: int  # while no row decodes: `max_batch_prefill_tokens`, or a second's worth where that is less
    beside_decode: int  # while rows decode: what fits the longest gap we allow, from the speed measured at warm-up
    chunked: bool  # a prompt may be read in pieces
    padded: bool = False  # whole prompts share rectangles, and it is those that count

    def tokens(self, num_decode: int) -> int:
        """Left for prompts once `num_decode` rows have their one token."""
        if num_decode == 0:
            return self.alone
        # At least one token, so that a prompt is never locked out by a full batch of decoding rows.
        limit = self.beside_decode if self.chunked else self.alone
        return max(1, min(self.alone, limit) - num_decode)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row whose prompt is not read yet, as the planner sees it."""

    row: int
    remaining: int  # tokens
    room: int  # tokens that its blocks still take


def prompt_order(priorities: npt.NDArray[np.int64], admissions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Indices of waiting prompts, who is read first; of at least one."""
    order = np.lexsort((admissions, -priorities))
    oldest = int(admissions.argmin())
    if oldest in order[:2]:
        return order
    return np.concatenate([order[:1], [oldest], order[1:][order[1:] != oldest]])


def share_budget(prompts: Sequence[Prompt], budget: int, chunked: bool, padded: bool = False) -> list[tuple[int, int]]:
    """(row, tokens) for prompts in the order given.

    While another prompt waits none takes more than half of the budget, so a short prompt passes a long one; what is
    left over goes to the first that can use it. Without chunking a prompt is taken whole or not at all; one larger
    than the whole budget is taken alone (it was refused before if it could never fit).
    """
    if not chunked:
        taken: list[tuple[int, int]] = []
        lens: list[int] = []
        for prompt in prompts:
            if prompt.remaining > prompt.room:
                continue
            lens.append(prompt.remaining)
            if taken and (padded_tokens(lens) if padded else sum(lens)) > budget:
                break
            taken.append((prompt.row, prompt.remaining))
        return taken
    wants = [min(prompt.remaining, prompt.room) for prompt in prompts]
    waiting = sum(1 for want in wants if want > 0)
    most = budget if waiting <= 1 else max(1, budget // 2)
    shares = [0] * len(prompts)
    left = budget
    for limit in (most, budget):
        for index, want in enumerate(wants):
            if left == 0:
                break
            more = min(want - shares[index], limit - shares[index], left)
            if more > 0:
                shares[index] += more
                left -= more
    return [(prompt.row, share) for prompt, share in zip(prompts, shares, strict=True) if share > 0]
