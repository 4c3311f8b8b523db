"""The cut against transformers' warpers, which sort. Equals at the border of top-p may differ in id, not in number."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tgi.server.sampling.warpers import scaled_scores, warp_mask


def cut(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_top_k=None) -> torch.Tensor:
    n = len(logits)
    scores = scaled_scores(logits, torch.full((n,), temperature))
    return warp_mask(scores, torch.full((n,), top_k), torch.full((n,), top_p), torch.full((n,), min_p), max_top_k)


def by_sorting(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    scores = logits / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores > float("-inf")


def rows(kind: str, vocab_size: int = 1003) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(8, vocab_size, generator=generator) * torch.tensor([0.1, 1, 1, 2, 3, 3, 5, 8]).unsqueeze(1)
    if kind == "ties":
        return (logits * 2).round() / 2
    if kind == "bfloat16":
        return logits.bfloat16().float()
    if kind == "banned":
        return logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.7, float("-inf"))
    return logits


@pytest.mark.parametrize("kind", ["random", "ties", "bfloat16", "banned"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    "warpers",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 300},
        {"top_k": 5000},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1},
        {},
    ],
    ids=str,
)
def test_keeps_what_sorting_keeps(kind, temperature, warpers):
    logits = rows(kind)
    ours, theirs = cut(logits, temperature, **warpers), by_sorting(logits, temperature, **warpers)
    if not warpers:
        assert ours.all()
        return
    # Banned tokens fill up a large k on our side; they cannot be chosen.
    ours &= logits > float("-inf")
    assert ours.sum(-1).tolist() == theirs.sum(-1).tolist()
    for row in range(len(logits)):
        assert torch.equal(logits[row][ours[row]].sort().values, logits[row][theirs[row]].sort().values)


def test_top_k_keeps_equals_of_the_kth():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    assert cut(logits, top_k=2).tolist() == [[True, False, True, True, True, False]]


def test_top_p_keeps_lower_ids_among_equals():
    logits = torch.zeros(1, 10)
    assert cut(logits, top_p=0.35).tolist() == [[True] * 4 + [False] * 6]
    logits[0, 7] = 3.0
    assert cut(logits, top_p=0.5).nonzero()[:, 1].tolist() == [7]


@pytest.mark.parametrize("max_top_k", [None, 60, 2000])
def test_selecting_and_bisecting_agree(max_top_k):
    logits = rows("ties")
    assert torch.equal(cut(logits, top_k=60, max_top_k=max_top_k), cut(logits, top_k=60))


def test_rows_with_and_without_top_k_share_a_batch():
    logits = rows("random")
    scores = scaled_scores(logits, torch.ones(8))
    top_k = torch.tensor([0, 5, 0, 1, 3, 0, 2000, 9])
    mask = warp_mask(scores, top_k, torch.ones(8), torch.zeros(8), max_top_k=9)
    assert mask.sum(-1).tolist() == [1003, 5, 1003, 1, 3, 1003, 1003, 9]


@pytest.mark.fault("TGI#965")
@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 0.7, 1e6])
@pytest.mark.parametrize("top_p", [1e-30, 1e-12, 0.95, 1.0])
def test_at_least_the_best_token_stays(temperature, top_p):
    logits = torch.cat([rows("random"), rows("banned"), torch.full((1, 1003), -5e4), rows("random") * 1e30])
    mask = cut(logits, temperature, top_k=3, top_p=top_p, min_p=1.0)
    assert mask.gather(1, logits.argmax(-1, keepdim=True)).all()


def test_a_row_is_cut_alike_in_every_batch():
    logits = rows("bfloat16")
    together = cut(logits, 0.8, top_p=0.9)
    for row in range(len(logits)):
        assert torch.equal(cut(logits[row : row + 1], 0.8, top_p=0.9)[0], together[row])
