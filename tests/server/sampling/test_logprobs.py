"""Best tokens and their ties, with the reference values that TGI's clients know."""

from __future__ import annotations

import pytest
import torch

from tgi.server.sampling.logprobs import TIE_ROOM, keep_top, log_normalizer, top_logprobs


# TGI's own cases: equals of the n-th are included.
@pytest.mark.row("A: top_n_tokens")
@pytest.mark.parametrize(
    ("n", "ids"),
    [(0, []), (1, [0]), (2, [0, 3]), (3, [0, 3, 1, 4]), (4, [0, 3, 1, 4]), (5, [0, 3, 1, 4, 2]), (9, [0, 3, 1, 4, 2])],
)
def test_ties_of_the_nth_are_included(n, ids):
    scores = torch.tensor([[-1.0, -3.0, -4.0, -2.0, -3.0]])
    top_ids, logprobs = top_logprobs(scores, torch.zeros(1), max(n, 1))
    assert top_ids[0, : keep_top(logprobs[0].tolist(), n)].tolist() == ids


def test_equals_come_in_the_order_of_ids():
    scores = torch.zeros(1, 6)
    scores[0, 4] = 1.0
    ids, _ = top_logprobs(scores, log_normalizer(scores), 6)
    assert ids.tolist() == [[4, 0, 1, 2, 3, 5]]


def test_a_neighbour_who_wants_more_makes_no_room_for_more_equals():
    scores = torch.zeros(1, 60)
    counts = {
        keep_top(top_logprobs(scores, log_normalizer(scores), top_n)[1][0].tolist(), 2) for top_n in (2, 5, 20, 60)
    }
    assert counts == {2 + TIE_ROOM}


def test_impossible_tokens_do_not_count():
    scores = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]])
    ids, logprobs = top_logprobs(scores, log_normalizer(scores), 3)
    count = keep_top(logprobs[0].tolist(), 3)
    assert ids[0, :count].tolist() == [0, 2]
    assert logprobs[0, :count].tolist() == pytest.approx([-0.693147] * 2)


def test_width_leaves_room_for_ties_and_stays_within_the_vocabulary():
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    assert top_logprobs(scores, log_normalizer(scores), 5)[0].shape == (2, 5 + TIE_ROOM)
    assert top_logprobs(scores[:, :6], log_normalizer(scores), 5)[0].shape == (2, 6)
