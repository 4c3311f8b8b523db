"""Op experts: every token through the few experts that its router chose. The form that experts are kept in, and the
torch reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from tgi.server.ops.matmul import LinearKernel

Activation = Callable[[torch.Tensor], torch.Tensor]
Dense = tuple[torch.Tensor, torch.Tensor | None]  # weight [out, in] and bias [out] of one expert
Linear = Callable[[torch.Tensor, torch.Tensor | None, bool], LinearKernel]


class ExpertsKernel(Protocol):
    @property
    def kept(self) -> Sequence[torch.Tensor]:
        """All that it holds on to."""
        ...

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [tokens, hidden]; ids [tokens, k] int64, the experts of each token, no two alike; weights [tokens, k]
        float32 -> [tokens, hidden], sum over k of weights[k] * down(activation(up(hidden))), summed in float32 in order
        of the experts' numbers, whatever else is in the batch."""
        ...


class OneByOne:
    """Each expert is a linear map of its own and takes its tokens in one product: those of experts that nobody chose
    are not read. Learns how many tokens those are, for which a GPU would have to be waited for."""

    def __init__(self, up: Sequence[LinearKernel], down: Sequence[LinearKernel], activation: Activation) -> None:
        self._up, self._down, self._activation = up, down, activation
        self.kept = [tensor for kernel in (*up, *down) for tensor in kernel.kept]

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = hidden.new_zeros(hidden.shape, dtype=torch.float32)
        order = ids.flatten().argsort(stable=True)  # pairs (token, choice) by expert
        counts = torch.bincount(ids.flatten(), minlength=len(self._up)).tolist()
        tokens = (order // ids.shape[1]).split(counts)
        shares = weights.flatten()[order].unsqueeze(-1).split(counts)
        for expert, count in enumerate(counts):
            if count:
                inner = self._activation(self._up[expert](hidden[tokens[expert]]))
                total.index_add_(0, tokens[expert], self._down[expert](inner).float() * shares[expert])
        return total.to(hidden.dtype)


def experts(
    num_experts: int, up: Iterable[Dense], down: Iterable[Dense], activation: Activation, linear: Linear
) -> ExpertsKernel:
    """`up`, `down`: weights by expert, each made when it is asked for; a kernel may keep them in a form of its own.
    `linear`: the platform's product with a weight."""
    del num_experts
    return OneByOne([linear(*dense, False) for dense in up], [linear(*dense, False) for dense in down], activation)
