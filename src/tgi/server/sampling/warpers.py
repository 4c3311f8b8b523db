"""Temperature, top-k, top-p, min-p and typical-p as one cut per row, without sorting. Plain torch, never waits for the
device.

Every warper is a threshold: of a score or, for typical-p, of a score's distance from the mean. It is found by
bisection over the 31 bits of such a number, on counts (top-k) and on masses (top-p, typical-p). Masses are integers:
their sums do not depend on the order of summation, so a row is cut alike in every batch and on every device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tgi.server.ops.exact_math import exact_exp

MASS_BITS = 40  # mass of the best token = 2^40: 2^18 tokens stay below 2^63, and 2^-40 below any top-p that matters
_RANK_MASK = 0x7FFFFFFF
_RANK_LIMIT = 0x7F800000  # of a score of -inf
_RANK_STEPS = 31  # halvings from all ranks to one
_TOPK_LIMIT = 1024  # beyond, bisection is faster than selecting


def scaled_scores(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """logits [n, vocab] f32, temperatures [n] f32 -> (logits - best) / temperature: ≤ 0, and no NaN where the row's
    best is finite, however small the temperature."""
    return (logits - logits.amax(-1, keepdim=True)) / temperatures.unsqueeze(1)


def warp_mask(
    scores: torch.Tensor,  # [n, vocab] f32, ≤ 0, best of each row 0
    top_k: torch.Tensor,  # [n] int64; 0: off
    top_p: torch.Tensor,  # [n] f32; ≥ 1: off
    min_p: torch.Tensor,  # [n] f32; 0: off
    max_top_k: int | None = None,
    typical_p: torch.Tensor | None = None,  # [n] f32; ≥ 1: off
) -> torch.Tensor:
    """What may still be chosen, bool [n, vocab], at least one token of each row. `max_top_k` bounds `top_k` where the
    host knows a bound (0: no row uses it). `typical_p` is None where no row uses it.

    top-k: scores below the k-th best go; equals of the k-th stay. top-p: the smallest set, best first and lower ids
    first among equals, whose share of what top-k kept reaches top_p. min-p: tokens with less than min_p times the
    probability of the best go. typical-p (Meister et al., "Locally typical sampling", 2022): of what all these kept,
    the smallest set whose share reaches typical_p, first those whose information is nearest to its mean; equals of the
    last stay. The best may go.
    """
    ranks = scores.view(torch.int32) & _RANK_MASK  # of a value ≤ 0: smaller is better
    kept = _top_k_mask(scores, ranks, top_k, max_top_k)
    weights = exact_exp(scores)
    kept = (kept & _top_p_mask(ranks, weights, kept, top_p)) & (weights >= min_p.unsqueeze(1))
    return kept if typical_p is None else kept & _typical_mask(scores, weights, kept, typical_p)


def _top_k_mask(scores: torch.Tensor, ranks: torch.Tensor, top_k: torch.Tensor, max_top_k: int | None) -> torch.Tensor:
    vocab_size = ranks.shape[1]
    if max_top_k == 0:
        return torch.ones_like(ranks, dtype=torch.bool)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).unsqueeze(1)
    if max_top_k is not None and max_top_k <= min(_TOPK_LIMIT, vocab_size):
        best = ranks.topk(max_top_k, dim=-1, largest=False).values
        limit = best.gather(1, (k - 1).clamp(max=max_top_k - 1))
        return (ranks <= limit) | (k == vocab_size)
    return ranks <= _smallest_rank(lambda limit: (ranks <= limit).sum(-1, keepdim=True) >= k, ranks)


def _top_p_mask(ranks: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    masses = _masses(weights, kept)
    share = top_p.unsqueeze(1).double()
    needed = _needed(share, masses)

    def mass_within(limit: torch.Tensor) -> torch.Tensor:
        return torch.where(ranks <= limit, masses, 0).sum(-1, keepdim=True)

    limit = _smallest_rank(lambda limit: mass_within(limit) >= needed, ranks)
    # Of several equals at the border only as many stay as the share needs.
    border = kept & (ranks == limit)
    border_mass = torch.where(border, masses, 0).amax(-1, keepdim=True).clamp(min=1)
    border_count = (needed - mass_within(limit - 1) + border_mass - 1) // border_mass
    chosen = (ranks < limit) | (border & (border.cumsum(-1) <= border_count))
    return chosen | (share >= 1.0)


def _typical_mask(
    scores: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, typical_p: torch.Tensor
) -> torch.Tensor:
    """|-log p - entropy| is |score - mean score|: the normalizer falls out."""
    masses = _masses(weights, kept)
    moments = torch.where(masses > 0, (weights * scores * 2.0**MASS_BITS).to(torch.int64), 0)
    mean = moments.sum(-1, keepdim=True).double() / masses.sum(-1, keepdim=True).double()
    distances = (scores - mean.float()).abs().view(torch.int32)
    share = typical_p.unsqueeze(1).double()
    needed = _needed(share, masses)

    def mass_within(limit: torch.Tensor) -> torch.Tensor:
        return torch.where(distances <= limit, masses, 0).sum(-1, keepdim=True)

    return (distances <= _smallest_rank(lambda limit: mass_within(limit) >= needed, distances)) | (share >= 1.0)


def _masses(weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept, (weights * 2.0**MASS_BITS).to(torch.int64), 0)


def _needed(share: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """The mass [n, 1] int64 that a share of all is, at least that of one token."""
    return (share * masses.sum(-1, keepdim=True).double()).to(torch.int64).clamp(min=1)


def _smallest_rank(holds: Callable[[torch.Tensor], torch.Tensor], ranks: torch.Tensor) -> torch.Tensor:
    """The smallest limit per row, [n, 1] int32, for which `holds` (monotone, true at the largest rank)."""
    low = torch.full_like(ranks[:, :1], -1)
    high = torch.full_like(low, _RANK_LIMIT)
    for _ in range(_RANK_STEPS):
        middle = low + ((high - low) >> 1)
        true = holds(middle)
        high = torch.where(true, middle, high)
        low = torch.where(true, low, middle)
    return high
