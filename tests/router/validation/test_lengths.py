from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.errors import ContextTooLong, InvalidRequest
from tgi.router.validation.lengths import CHECKED_NEW_TOKENS, LengthRule, check_truncate, max_new_tokens

NATIVE = LengthRule(max_input=3000, max_total=4000)
V1 = LengthRule(3000, 4000, "messages", "max_tokens", cut_to_fit=False)

positive = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("num_input", "wish", "expected"),
    [
        (10, 20, 20),
        (10, None, 3990),
        (3000, None, 1000),
        (10, 3990, 3990),
        (2976, 5000, 1024),  # only 1024 of the wish are checked, the rest is cut
        (10, 100_000, 3990),
    ],
)
@pytest.mark.row("A: max_new_tokens: default fills the context")
def test_native_answers_are_cut_to_what_fits(num_input: int, wish: int | None, expected: int) -> None:
    assert max_new_tokens(num_input, wish, NATIVE) == expected


BOTH = "`inputs` tokens + `max_new_tokens` must be <= 4000. Given: {} `inputs` tokens and {} `max_new_tokens`"
INPUT = "`inputs` must have less than 3000 tokens. Given: {}"


@pytest.mark.parametrize(
    ("num_input", "wish", "text"),
    [
        (2977, 1024, BOTH.format(2977, 1024)),
        (2977, 9999, BOTH.format(2977, 9999)),
        (3001, 10, INPUT.format(3001)),
        (3001, None, INPUT.format(3001)),
        (4001, None, BOTH.format(4001, 0)),
    ],
)
def test_native_routes_refuse_what_tgi_refuses_in_its_order(num_input: int, wish: int | None, text: str) -> None:
    with pytest.raises(ContextTooLong, match=f"^{re.escape(text)}$"):
        max_new_tokens(num_input, wish, NATIVE)


@pytest.mark.fault("vllm#6707")
def test_v1_without_a_wish_takes_what_is_left() -> None:
    assert max_new_tokens(1000, None, V1) == 3000


@pytest.mark.fault("vllm#33418")
def test_v1_names_both_counts_when_only_the_sum_is_too_long() -> None:
    text = "`messages` tokens + `max_tokens` must be <= 4000. Given: 2000 `messages` tokens and 4000 `max_tokens`"
    with pytest.raises(ContextTooLong, match=f"^{re.escape(text)}$") as caught:
        max_new_tokens(2000, 4000, V1)
    assert caught.value.param == "max_tokens"


def test_v1_blames_the_prompt_when_it_is_too_long_by_itself() -> None:
    with pytest.raises(ContextTooLong, match=r"^`messages` must have less than 3000 tokens. Given: 3500$") as caught:
        max_new_tokens(3500, 4000, V1)
    assert caught.value.param == "messages"


@given(num_input=positive, wish=st.none() | st.integers(1, 6000), max_input=positive, more=positive, cut=st.booleans())
def test_an_accepted_answer_fits_and_has_room(
    num_input: int, wish: int | None, max_input: int, more: int, cut: bool
) -> None:
    rule = LengthRule(max_input, max_input + more, cut_to_fit=cut)
    try:
        allowed = max_new_tokens(num_input, wish, rule)
    except ContextTooLong:
        checked = 1 if wish is None else min(wish, CHECKED_NEW_TOKENS) if cut else wish
        assert num_input > max_input or num_input + checked > rule.max_total
        return
    assert 1 <= allowed <= (wish or allowed)
    assert num_input <= max_input
    assert num_input + allowed <= rule.max_total
    assert cut or allowed == (wish or rule.max_total - num_input)
    assert allowed == wish or num_input + allowed == rule.max_total, "cut further than needed"


@pytest.mark.parametrize("truncate", [1, 3000, None])
def test_truncate_within_the_longest_input(truncate: int | None) -> None:
    check_truncate(truncate, NATIVE)


@pytest.mark.parametrize("truncate", [0, 3001])
@pytest.mark.row("A: truncate")
def test_truncate_outside_is_refused(truncate: int) -> None:
    text = f"`truncate` must be strictly positive and less than 3000. Given: {truncate}"
    with pytest.raises(InvalidRequest, match=f"^{re.escape(text)}$"):
        check_truncate(truncate, NATIVE)
