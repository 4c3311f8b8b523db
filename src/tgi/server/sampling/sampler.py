"""logits -> next ids. The order of the steps, per row:

1. best: the row's largest logit; a row whose best is not finite (a NaN, +inf, or nothing possible) is marked `is_nan`
2. temperature: score = (logit - best) / temperature
3. top-k, then top-p of what is left, then min-p (`warpers`): the rest can no longer be chosen
4. noise: Gumbel noise keyed by (seed, position, token id) (`noise`)
5. choice: argmax of score + noise; a greedy row: argmax of the logits, without steps 2 to 4. Lower ids win among equals
6. logprobs: of the chosen and of the best tokens, from the logits (raw) or from the scores left after step 3

Never waits for the device. Where a fused kernel exists (`ops/sampling`) it does all of this; here it is composed from
torch. Both give the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi.server.ops.sampling import (
    FLAG_RAW,
    FLAG_SAMPLED,
    FLAGS,
    MIN_P,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from tgi.server.sampling.logprobs import log_normalizer, top_logprobs
from tgi.server.sampling.noise import gumbel_noise
from tgi.server.sampling.state import SamplingState
from tgi.server.sampling.warpers import scaled_scores, warp_mask


@dataclass(frozen=True, slots=True)
class SampleOutput:
    ids: torch.Tensor  # [n] int64; a legal id (0) where is_nan
    logprobs: torch.Tensor  # [n] f32
    is_nan: torch.Tensor  # [n] bool
    top_ids: torch.Tensor | None  # [n, top_n + room for ties] int64, best first
    top_logprobs: torch.Tensor | None  # same, f32; `logprobs.keep_top` says how many of a row count


def sample(
    logits: torch.Tensor,  # [n, vocab] f32
    rows: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int64, index of the chosen token in prompt + generated
    state: SamplingState,
    greedy_only: bool,  # no row samples (`state.is_greedy`)
    top_n: int = 0,  # the most that any row asks for
) -> SampleOutput:
    if state.kernel is not None:
        ids, logprobs, is_nan, scores, normalizers = state.kernel(
            logits, state.table, rows, positions, greedy_only, top_n > 0
        )
        top = (None, None) if scores is None else top_logprobs(scores, normalizers, top_n)
        return SampleOutput(ids, logprobs, is_nan, *top)
    if greedy_only:
        return _sample_greedy(logits, top_n)
    return _sample_full(logits, rows, positions, state, top_n)


def _sample_greedy(logits: torch.Tensor, top_n: int) -> SampleOutput:
    best, ids = logits.max(dim=-1)
    is_nan = ~torch.isfinite(best)
    normalizer = log_normalizer(logits)
    return SampleOutput(torch.where(is_nan, 0, ids), best - normalizer, is_nan, *_top(logits, normalizer, top_n))


def _sample_full(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, state: SamplingState, top_n: int
) -> SampleOutput:
    words = state.table[rows]
    reals = words.view(torch.float32)
    sampled = (words[:, FLAGS] & FLAG_SAMPLED).bool().unsqueeze(1)
    raw = (words[:, FLAGS] & FLAG_RAW).bool().unsqueeze(1)
    seeds = (words[:, SEED_HIGH].long() << 32) | (words[:, SEED_LOW].long() & 0xFFFFFFFF)

    best, greedy_ids = logits.max(dim=-1)
    is_nan = ~torch.isfinite(best)
    scores = scaled_scores(logits, reals[:, TEMPERATURE])
    keep = warp_mask(scores, words[:, TOP_K].long(), reals[:, TOP_P], reals[:, MIN_P], state.max_top_k)
    warped = scores.masked_fill(~keep, float("-inf"))
    noisy = warped + gumbel_noise(seeds, positions, logits.shape[1])
    ids = torch.where(sampled.squeeze(1), noisy.argmax(-1), greedy_ids)
    ids = torch.where(is_nan, 0, ids)

    shown = torch.where(raw, logits, warped)
    normalizer = log_normalizer(shown)
    logprobs = shown.gather(1, ids.unsqueeze(1)).squeeze(1) - normalizer
    return SampleOutput(ids, logprobs, is_nan, *_top(shown, normalizer, top_n))


def _top(
    scores: torch.Tensor, normalizer: torch.Tensor, top_n: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    return top_logprobs(scores, normalizer, top_n) if top_n > 0 else (None, None)
