"""logits -> next ids. The order of the steps, per row:

1. processors (`processors`), for greedy rows too:
   a. logit bias: added to the logits of the model
   b. watermark: green tokens, drawn by the token before, get delta more
   c. repetition penalty, over prompt and output: a negative logit is multiplied by it, another divided
   d. frequency and presence penalty, over the output: logit - (count · frequency + [count > 0] · presence)
   e. grammar: tokens that `allowed` does not name become impossible (-inf)
   f. bad words: the last token of a word becomes impossible where the row's output ends with its others
   g. min_new_tokens: ids that would end the row too early become impossible
   Of f and g each is left out where it would leave nothing possible: a row that may only end, ends
2. best: the row's largest logit; a row whose best is not finite (a NaN, +inf, or nothing possible) is marked `is_nan`
3. temperature: score = (logit - best) / temperature
4. top-k, then top-p of what is left, then min-p, then typical-p of what is left (`warpers`): the rest can no longer be
   chosen; at least one token stays
5. noise: Gumbel noise keyed by (seed, position, token id) (`noise`)
6. choice: argmax of score + noise; a greedy row: argmax of the logits, without steps 3 to 5. Lower ids win among
   equals
7. logprobs: of the chosen and of the best tokens, from the model's own logits (raw), before step 1, or from what is
   left after step 4

The order of 1b to 1e, 3 and 4 is TGI's (its min-p does not exist; transformers has it before typical-p too). A bias
comes first, as it speaks of the model's logits. Bans come last, so that nothing makes up for -inf.

What changes with each token (counts, the last id) is the device's and changes by `SamplingState.commit` alone. Never
waits for the device. Where a fused kernel exists (`ops/sampling`) it does all of this; here it is composed from torch.
Both give the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi.server.ops.sampling import (
    FLAG_RAW,
    FLAG_SAMPLED,
    FLAG_TYPICAL,
    FLAGS,
    FLAGS_PROCESSED,
    MIN_P,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
)
from tgi.server.sampling.logprobs import log_normalizer, top_logprobs
from tgi.server.sampling.noise import gumbel_noise
from tgi.server.sampling.processors import process
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
    flags: int,  # what any of the rows uses: `state.flags`
    top_n: int = 0,  # the most that any row asks for
    allowed: torch.Tensor | None = None,  # [n, ceil(vocab / 32)] int32: bit i % 32 of word i // 32. None: all are
) -> SampleOutput:
    if state.kernel is not None:
        ids, logprobs, is_nan, scores, normalizers = state.kernel(
            logits, state.tables, rows, positions, flags, allowed, top_n > 0
        )
        top = (None, None) if scores is None else top_logprobs(scores, normalizers, top_n)
        return SampleOutput(ids, logprobs, is_nan, *top)
    if not flags & ~FLAG_RAW and allowed is None:
        best, ids = logits.max(dim=-1)
        is_nan = ~torch.isfinite(best)
        return _finish(logits, torch.where(is_nan, 0, ids), is_nan, top_n)
    return _compose(logits, rows, positions, state, flags, top_n, allowed)


def _compose(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingState,
    flags: int,
    top_n: int,
    allowed: torch.Tensor | None,
) -> SampleOutput:
    words = state.table[rows]
    processed = logits
    if flags & FLAGS_PROCESSED or allowed is not None:
        processed = process(logits, words, positions, state.tables, flags, allowed)
    best, ids = processed.max(dim=-1)
    is_nan = ~torch.isfinite(best)
    if processed is not logits:  # a mask may hide what is broken
        is_nan |= ~torch.isfinite(logits.amax(dim=-1))
    shown = processed
    if flags & FLAG_SAMPLED:
        shown = _warp(processed, words, state, flags)
        sampled = (words[:, FLAGS] & FLAG_SAMPLED).bool()
        ids = torch.where(sampled, _draw(shown, words, positions), ids)
    ids = torch.where(is_nan, 0, ids)
    if flags & FLAG_RAW and shown is not logits:
        shown = torch.where((words[:, FLAGS] & FLAG_RAW).bool().unsqueeze(1), logits, shown)
    return _finish(shown, ids, is_nan, top_n)


def _warp(logits: torch.Tensor, words: torch.Tensor, state: SamplingState, flags: int) -> torch.Tensor:
    """Scores [n, vocab]: -inf for what can no longer be chosen."""
    reals = words.view(torch.float32)
    scores = scaled_scores(logits, reals[:, TEMPERATURE])
    typical_p = reals[:, TYPICAL_P] if flags & FLAG_TYPICAL else None
    keep = warp_mask(scores, words[:, TOP_K].long(), reals[:, TOP_P], reals[:, MIN_P], state.max_top_k, typical_p)
    return scores.masked_fill(~keep, float("-inf"))


def _draw(scores: torch.Tensor, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    seeds = (words[:, SEED_HIGH].long() << 32) | (words[:, SEED_LOW].long() & 0xFFFFFFFF)
    return (scores + gumbel_noise(seeds, positions, scores.shape[1])).argmax(-1)


def _finish(shown: torch.Tensor, ids: torch.Tensor, is_nan: torch.Tensor, top_n: int) -> SampleOutput:
    """`shown` [n, vocab]: what logprobs are taken from."""
    normalizer = log_normalizer(shown)
    logprobs = shown.gather(1, ids.unsqueeze(1)).squeeze(1) - normalizer
    top = top_logprobs(shown, normalizer, top_n) if top_n > 0 else (None, None)
    return SampleOutput(ids, logprobs, is_nan, *top)
