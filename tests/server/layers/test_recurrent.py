"""A state that runs over tokens: one by one, and in stretches that double."""

from __future__ import annotations

import pytest
import torch

from tgi.server.layers import recurrent


@pytest.mark.parametrize("tokens", [1, 2, 5, recurrent.SCAN])
def test_stretches_that_double_end_where_tokens_one_by_one_do(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    run, decay = (torch.rand(3, tokens, 6, 4, generator=generator) for _ in range(2))
    state = torch.rand(3, 6, 4, generator=generator)
    expected = run.clone()
    last = recurrent._one_by_one(expected, decay, state)
    found = run.clone()
    torch.testing.assert_close(recurrent._doubling(found, decay.clone(), state), last)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(expected[:, -1], last)
    by_hand = state.double()
    for token in range(tokens):
        by_hand = run[:, token].double() + decay[:, token].double() * by_hand
    torch.testing.assert_close(last.double(), by_hand, rtol=1e-5, atol=1e-5)
