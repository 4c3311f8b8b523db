"""Who shares a rectangle: padding takes no more than the tokens do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tgi.server.padding import PADDED_BY, SMALL, padded_tokens, rectangles

SIZES = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), max_size=40)


@given(SIZES)
def test_every_text_is_in_one_rectangle_that_padding_does_not_double(sizes: list[tuple[int, int]]) -> None:
    groups = rectangles(sizes)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    for group in groups:
        area = len(group) * sum(max(sizes[index][part] for index in group) for part in range(2))
        assert len(group) == 1 or area <= PADDED_BY * sum(max(sum(sizes[index]), SMALL) for index in group)


def test_texts_of_like_length_go_together_and_a_long_one_takes_no_short_ones_along() -> None:
    assert sorted(rectangles([(100,), (110,), (90,), (120,)])[0]) == [0, 1, 2, 3]
    assert rectangles([(1,), (2,), (3,)]) == [[2, 1, 0]]  # short ones always: each has room for more anyway
    assert rectangles([(2000,), *((20,) for _ in range(10))])[0] == [0, 1]
    assert rectangles([]) == []


def test_padding_counts() -> None:
    assert padded_tokens([100, 60]) == 200
    assert padded_tokens([500]) == 500
    assert padded_tokens([1000, 10, 10, 10, 10]) == 2 * 1000 + 3 * 10
    assert padded_tokens([]) == 0
