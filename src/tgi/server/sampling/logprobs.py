"""Logprobs of chosen and of the best tokens. Knows nothing of why a token was chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# How many tokens beyond the n-th are handed to the host, for equals of the n-th. In bfloat16 logits equals are common,
# long runs of them are not.
TIE_ROOM = 8


def log_normalizer(scores: torch.Tensor) -> torch.Tensor:
    """scores [n, vocab] f32 -> log of the sum of exp [n]; finite where one score is."""
    return torch.logsumexp(scores, dim=-1)


def top_logprobs(scores: torch.Tensor, normalizer: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of each row: ids int64 and logprobs f32, both [n, min(top_n + TIE_ROOM, vocab)], best first and
    lower ids first among equals. Where more equals come last than there is room for, any of them stand there.
    `keep_top` cuts a row of it."""
    width = min(top_n + TIE_ROOM, scores.shape[1])
    values, ids = scores.topk(width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, by_value), values - normalizer.unsqueeze(1)


def keep_top(logprobs: Sequence[float], n: int) -> int:
    """How many of a row's best tokens (best first) answer a request for `n`: all that are not below the n-th, so equals
    of the n-th are included, up to TIE_ROOM of them however many the batch has room for; never one of no probability
    (-inf)."""
    if n <= 0 or not logprobs:
        return 0
    threshold = logprobs[min(n, len(logprobs)) - 1]
    return sum(1 for logprob in logprobs[: n + TIE_ROOM] if logprob >= threshold and logprob > float("-inf"))
