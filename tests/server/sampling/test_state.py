"""Rows of sampling parameters: who is greedy, what is refused, and that a row's add touches that row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tgi.errors import InvalidRequest
from tgi.server.sampling.state import SamplingState
from tgi.shard_client.messages import Sampling


@pytest.fixture
def state() -> SamplingState:
    return SamplingState(6, 100, torch.device("cpu"))


def test_rows_are_greedy_until_added_and_after_removal(state):
    rows = np.array([1, 2])
    assert state.is_greedy(rows)
    state.add(2, Sampling(do_sample=True, temperature=0.5))
    assert not state.is_greedy(rows)
    assert state.is_greedy(np.array([0, 1, 3]))
    assert state.is_greedy(np.array([], dtype=np.int64))
    state.remove(2)
    assert state.is_greedy(rows)


def test_temperature_without_do_sample_stays_greedy(state):
    """Whether a request samples is the router's decision."""
    state.add(0, Sampling(do_sample=False, temperature=0.5, top_k=3, top_p=0.5))
    assert state.is_greedy(np.array([0]))
    assert state.max_top_k == 0


def test_add_touches_its_row_alone(state):
    before = state.table.clone()
    state.add(3, Sampling(do_sample=True, temperature=0.5, top_p=0.25, min_p=0.125, top_k=9, seed=2**64 - 2))
    changed = (state.table != before).any(-1)
    assert changed.tolist() == [False, False, False, True, False, False]
    reals = state.table[3].view(torch.float32)
    assert reals[:3].tolist() == [0.5, 0.25, 0.125]
    assert state.table[3, 3:6].tolist() == [9, -2, -1]


def test_max_top_k_follows_the_live_rows(state):
    state.add(1, Sampling(do_sample=True, top_k=7))
    state.add(2, Sampling(do_sample=True, top_k=2**40))
    assert state.max_top_k == 2**31 - 1
    state.remove(2)
    assert state.max_top_k == 7


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(typical_p=0.9),
        Sampling(repetition_penalty=1.1),
        Sampling(frequency_penalty=0.1),
        Sampling(presence_penalty=-0.1),
        Sampling(logit_bias=((5, 1.0),)),
        Sampling(watermark=True),
        Sampling(do_sample=True, temperature=0.0),
        Sampling(do_sample=True, temperature=float("nan")),
        Sampling(min_p=1.1),
        Sampling(min_p=float("nan")),
    ],
    ids=lambda sampling: next(k for k in Sampling.__slots__ if getattr(sampling, k) != getattr(Sampling(), k)),
)
def test_what_is_not_applied_is_refused_by_name_and_changes_nothing(state, sampling):
    before = state.table.clone()
    with pytest.raises(InvalidRequest) as caught:
        state.add(0, sampling)
    assert caught.value.param is not None
    assert f"`{caught.value.param}`" in str(caught.value)
    assert torch.equal(state.table, before)
