"""Rows of sampling parameters: what a step of them uses, what is refused, and that an add touches its row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tgi.errors import InvalidRequest
from tgi.server.ops.sampling import (
    COUNT_SLOT,
    EDIT_SLOT,
    FLAG_BAD_WORDS,
    FLAG_BANNED,
    FLAG_BIASED,
    FLAG_PENALISED,
    FLAG_RAW,
    FLAG_SAMPLED,
    FLAG_TYPICAL,
    FLAG_WATERMARK,
    LAST_ID,
    SEED_LOW,
    TOP_K,
)
from tgi.server.sampling.state import SamplingState, refuse_invalid
from tgi.shard_client.messages import Sampling


@pytest.fixture
def state() -> SamplingState:
    return SamplingState(6, 100, torch.device("cpu"))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def flags(state: SamplingState, *rows: int, position: int = 0) -> int:
    return state.flags(np.array(rows, np.int64), np.full(len(rows), position, np.int64))


def test_rows_are_greedy_until_added_and_after_removal(state):
    assert flags(state, 1, 2) == 0
    state.add(2, Sampling(do_sample=True, temperature=0.5))
    assert flags(state, 1, 2) == FLAG_SAMPLED
    assert flags(state, 0, 1, 3) == 0
    assert flags(state) == 0
    state.remove(2)
    assert flags(state, 1, 2) == 0


@pytest.mark.parametrize(
    ("sampling", "used"),
    [
        (
            Sampling(temperature=0.5, top_k=3, top_p=0.5, typical_p=0.5),
            0,
        ),  # the router decides whether it samples
        (Sampling(do_sample=True), FLAG_SAMPLED),
        (Sampling(do_sample=True, typical_p=0.9), FLAG_SAMPLED | FLAG_TYPICAL),
        (Sampling(raw_logprobs=True), FLAG_RAW),
        (Sampling(repetition_penalty=1.1), FLAG_PENALISED),
        (Sampling(frequency_penalty=0.1), FLAG_PENALISED),
        (Sampling(presence_penalty=-0.1), FLAG_PENALISED),
        (Sampling(logit_bias=((5, 1.0),)), FLAG_BIASED),
        (Sampling(watermark=True), FLAG_WATERMARK),
        (Sampling(bad_words=((5, 1),)), FLAG_BAD_WORDS),
    ],
)
def test_a_step_is_of_the_kind_that_its_rows_need(state, sampling, used):
    state.add(1, sampling)
    state.add(2, Sampling(raw_logprobs=True))
    assert flags(state, 0, 1) == used
    assert flags(state, 2, 1) == used | FLAG_RAW


def test_temperature_without_do_sample_stays_greedy(state):
    state.add(0, Sampling(do_sample=False, temperature=0.5, top_k=3, top_p=0.5))
    assert state.max_top_k == 0


def test_bans_count_until_their_position(state):
    state.add(1, Sampling(), ban_until=7, banned_ids=(3,))
    assert [flags(state, 0, 1, position=position) for position in (6, 7)] == [FLAG_BANNED, 0]
    assert flags(state, 0, position=6) == 0


def test_add_touches_its_row_alone(state):
    before = state.table.clone()
    sampling = Sampling(
        do_sample=True,
        temperature=0.5,
        top_p=0.25,
        min_p=0.125,
        top_k=9,
        seed=2**64 - 2,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=2.0,
    )
    state.add(3, sampling, ids(1, 2, 2), ids(4, 4))
    changed = (state.table != before).any(-1)
    assert changed.tolist() == [False, False, False, True, False, False]
    words = state.table[3]
    assert words.view(torch.float32)[:7].tolist() == [0.5, 0.25, 0.125, 0.75, 1.5, -0.5, 2.0]
    assert words[TOP_K : SEED_LOW + 2].tolist() == [9, -2, -1]
    assert words[LAST_ID] == 4


def test_only_rows_that_need_more_than_their_words_get_slots(state):
    state.add(0, Sampling(do_sample=True, typical_p=0.5, watermark=True))
    assert len(state.tables.counts) == 1
    assert state.tables.edit_ids.shape == (1, 1)
    for row in range(6):
        state.add(row, Sampling(presence_penalty=1.0, logit_bias=tuple((token, 1.0) for token in range(row + 1))))
    slots = state.table[:, [COUNT_SLOT, EDIT_SLOT]]
    assert sorted(slots[:, 0].tolist()) == sorted(slots[:, 1].tolist()) == [1, 2, 3, 4, 5, 6]
    size = state.tables.counts.shape, state.tables.edit_ids.shape
    for turn in range(20):  # whoever leaves gives its slots back
        row = turn % 6
        if turn % 2:
            state.remove(row)
        state.add(row, Sampling(presence_penalty=1.0, logit_bias=((7, 1.0),)), ids(turn), ids(turn, turn))
    assert (state.tables.counts.shape, state.tables.edit_ids.shape) == size
    assert state.table[:, COUNT_SLOT].unique().numel() == 6
    # What another row has left in a slot is gone.
    assert (state.tables.counts[state.table[1, COUNT_SLOT]] != 0).sum() == 1
    assert (state.tables.edit_values[state.table[1, EDIT_SLOT]] != 0).sum() == 1


def test_max_top_k_follows_the_live_rows(state):
    state.add(1, Sampling(do_sample=True, top_k=7))
    state.add(2, Sampling(do_sample=True, top_k=2**40))
    assert state.max_top_k == 2**31 - 1
    state.remove(2)
    assert state.max_top_k == 7


@pytest.mark.fault("vllm#16529")
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(do_sample=True, temperature=0.0),
        Sampling(do_sample=True, temperature=float("nan")),
        Sampling(do_sample=True, temperature=float("inf")),
        Sampling(min_p=1.1),
        Sampling(min_p=float("nan")),
        Sampling(top_p=float("nan")),
        Sampling(typical_p=float("nan")),
        Sampling(repetition_penalty=0.0),
        Sampling(repetition_penalty=float("nan")),
        Sampling(frequency_penalty=float("inf")),
        Sampling(presence_penalty=float("nan")),
        Sampling(logit_bias=((100, 1.0),)),
        Sampling(logit_bias=((5, float("-inf")),)),
        Sampling(bad_words=((1, 100),)),
        Sampling(bad_words=((1,), ())),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_by_name_and_changes_nothing(state, sampling):
    before = state.table.clone()
    with pytest.raises(InvalidRequest) as caught:
        state.add(0, sampling)
    assert caught.value.param is not None
    assert f"`{caught.value.param}`" in str(caught.value)
    assert torch.equal(state.table, before)
    with pytest.raises(InvalidRequest):
        refuse_invalid(sampling, 100)
