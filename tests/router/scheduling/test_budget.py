"""Token arithmetic of scheduling."""

from __future__ import annotations

import pytest

from tgi.router.scheduling.budget import (
    PORTION,
    admission_reserve,
    blocks_for,
    least_admission,
    room_wanted,
    window_tokens,
    would_stop,
)


@pytest.mark.parametrize(("tokens", "block_size", "blocks"), [(1, 1, 1), (16, 16, 1), (17, 16, 2), (0, 16, 0)])
def test_blocks_for(tokens: int, block_size: int, blocks: int) -> None:
    assert blocks_for(tokens, block_size) == blocks


def test_the_window_is_rule_6() -> None:
    assert window_tokens(4, 0) == 6
    assert window_tokens(64, 4) == 330


@pytest.mark.parametrize(
    ("num_tokens", "room", "limit", "wanted"),
    [
        (100, 0, 1000, 106),  # an admission: the ids and the window
        (100, 106, 1000, 106),  # enough
        (101, 106, 1000, 122),  # one token short: a whole portion
        (110, 106, 1000, 122),
        (120, 106, 1000, 126),  # a long way behind: the window
        (101, 106, 110, 110),  # never beyond what it can use
        (109, 110, 110, 110),
        (100, 0, 103, 103),
    ],
)
def test_room_wanted(num_tokens: int, room: int, limit: int, wanted: int) -> None:
    assert room_wanted(num_tokens, room, window=6, limit=limit) == wanted


def test_a_grant_is_a_portion_at_least() -> None:
    for num_tokens in range(1, 300):
        for room in range(num_tokens, num_tokens + 20):
            wanted = room_wanted(num_tokens, room, 6, 10_000)
            assert wanted in (room, room + PORTION)
            assert wanted >= num_tokens + 6


def test_would_stop_below_two_steps() -> None:
    assert would_stop(100, 101, 0, 1000)
    assert not would_stop(100, 102, 0, 1000)
    assert would_stop(100, 109, 4, 1000)
    assert not would_stop(100, 110, 4, 1000)
    assert not would_stop(100, 101, 0, 101), "it needs no more"


@pytest.mark.parametrize(("rows", "block_size", "blocks"), [(0, 16, 0), (3, 16, 3), (3, 1, 48), (3, 256, 3)])
def test_admission_reserve_is_a_portion_per_row(rows: int, block_size: int, blocks: int) -> None:
    assert admission_reserve(rows, block_size) == blocks


@pytest.mark.row("D: waiting_served_ratio, max_waiting_tokens, max_batch_size")
def test_least_admission_is_the_ratio_until_rows_have_decoded_enough() -> None:
    assert least_admission(10, 0, 1.2, 20) == 12
    assert least_admission(10, 19, 0.3, 20) == 3
    assert least_admission(10, 20, 0.3, 20) is None
