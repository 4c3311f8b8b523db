"""Op experts: every token through the few experts that its router chose. Signature and torch reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tgi.server.ops.matmul import LinearKernel

Activation = Callable[[torch.Tensor], torch.Tensor]


def experts(
    hidden: torch.Tensor,  # [tokens, hidden]
    ids: torch.Tensor,  # [tokens, k] int64, the experts of each token, no two alike
    weights: torch.Tensor,  # [tokens, k] float32
    up: Sequence[LinearKernel],  # one per expert
    down: Sequence[LinearKernel],
    activation: Activation,
) -> torch.Tensor:
    """sum over k of weights[k] * down(activation(up(hidden))) -> [tokens, hidden], summed in float32 in order of the
    experts' numbers, whatever else is in the batch.

    On a CPU each expert takes its tokens in one product. A GPU is not waited for to learn how many those are: there
    each expert takes all tokens, and those that did not choose it count for nothing.
    """
    total = hidden.new_zeros(hidden.shape, dtype=torch.float32)
    if hidden.device.type == "cpu":
        _add_own(total, hidden, ids, weights, up, down, activation)
    else:
        _add_all(total, hidden, ids, weights, up, down, activation)
    return total.to(hidden.dtype)


def _add_own(
    total: torch.Tensor,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: Sequence[LinearKernel],
    down: Sequence[LinearKernel],
    activation: Activation,
) -> None:
    order = ids.flatten().argsort(stable=True)  # pairs (token, choice) by expert
    counts = torch.bincount(ids.flatten(), minlength=len(up)).tolist()
    tokens = (order // ids.shape[1]).split(counts)
    shares = weights.flatten()[order].unsqueeze(-1).split(counts)
    for expert, count in enumerate(counts):
        if count:
            outputs = down[expert](activation(up[expert](hidden[tokens[expert]])))
            total.index_add_(0, tokens[expert], outputs.float() * shares[expert])


def _add_all(
    total: torch.Tensor,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: Sequence[LinearKernel],
    down: Sequence[LinearKernel],
    activation: Activation,
) -> None:
    shares = weights.new_zeros(len(hidden), len(up)).scatter_(1, ids, weights)
    for expert in range(len(up)):
        outputs = down[expert](activation(up[expert](hidden)))
        total.addcmul_(outputs.float(), shares[:, expert : expert + 1])
