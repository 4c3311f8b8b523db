from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.server.engine.plan import PrefillBudget, Prompt, prompt_order, share_budget

prompts_strategy = st.lists(
    st.tuples(st.integers(1, 500), st.integers(0, 600)).map(lambda pair: Prompt(0, *pair)), min_size=0, max_size=8
).map(lambda prompts: [Prompt(row + 1, prompt.remaining, prompt.room) for row, prompt in enumerate(prompts)])


@pytest.mark.row("D: Token budgets")
@given(prompts_strategy, st.integers(1, 600))
def test_chunks_keep_to_budget_need_and_room(prompts: list[Prompt], budget: int) -> None:
    shares = dict(share_budget(prompts, budget, chunked=True))
    assert sum(shares.values()) <= budget
    for prompt in prompts:
        assert 0 <= shares.get(prompt.row, 0) <= min(prompt.remaining, prompt.room)
    wanted = sum(min(prompt.remaining, prompt.room) for prompt in prompts)
    assert sum(shares.values()) == min(budget, wanted), "budget is left while a prompt could use it"


def test_a_short_prompt_passes_a_long_one() -> None:
    shares = share_budget([Prompt(1, 10_000, 10_000), Prompt(2, 40, 40)], 512, chunked=True)
    assert dict(shares) == {1: 472, 2: 40}
    shares = share_budget([Prompt(1, 10_000, 10_000), Prompt(2, 9_000, 9_000)], 512, chunked=True)
    assert dict(shares) == {1: 256, 2: 256}


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    assert share_budget([Prompt(1, 10_000, 10_000)], 512, chunked=True) == [(1, 512)]


def test_without_chunking_prompts_are_taken_whole_and_in_order() -> None:
    prompts = [Prompt(1, 300, 300), Prompt(2, 300, 300), Prompt(3, 10, 10)]
    assert share_budget(prompts, 512, chunked=False) == [(1, 300)]
    assert share_budget([Prompt(1, 600, 600)], 512, chunked=False) == [(1, 600)]
    assert share_budget([Prompt(1, 100, 50), Prompt(2, 80, 80)], 512, chunked=False) == [(2, 80)]
    assert share_budget(prompts[:1] + prompts[2:], 310, chunked=False) == [(1, 300), (3, 10)]


def test_where_prompts_are_padded_their_rectangles_count() -> None:
    prompts = [Prompt(1, 300, 300), Prompt(2, 200, 200), Prompt(3, 200, 200)]
    assert share_budget(prompts, 700, chunked=False, padded=True) == [(1, 300), (2, 200)]
    assert share_budget(prompts, 700, chunked=False) == [(1, 300), (2, 200), (3, 200)]
    assert share_budget(prompts, 100, chunked=False, padded=True) == [(1, 300)]


def test_rows_that_decode_shrink_what_is_left_but_never_to_nothing() -> None:
    budget = PrefillBudget(alone=4096, beside_decode=256, chunked=True)
    assert budget.tokens(0) == 4096
    assert budget.tokens(56) == 200
    assert budget.tokens(300) == 1
    assert PrefillBudget(alone=4096, beside_decode=256, chunked=False).tokens(96) == 4000


def order_of(*prompts: tuple[int, int]) -> list[int]:
    priorities, admissions = np.array(prompts).T
    return prompt_order(priorities, admissions).tolist()


def test_prompts_are_read_by_priority_then_admission() -> None:
    assert order_of((0, 3)) == [0]
    assert order_of((0, 5), (0, 4), (2, 7), (2, 6)) == [3, 1, 2, 0]
    assert order_of((-1, 8), (5, 2), (0, 9)) == [1, 2, 0]


def test_a_stream_of_urgent_prompts_does_not_keep_the_oldest_from_being_read() -> None:
    waiting, number = {0: (0, 1_000)}, 0  # admission -> priority, tokens left
    for _ in range(20):
        while len(waiting) < 4:
            number += 1
            waiting[number] = (3, 150)
        admissions = list(waiting)
        order = order_of(*((waiting[admission][0], admission) for admission in admissions))
        prompts = [Prompt(admissions[i], waiting[admissions[i]][1], 1_000) for i in order]
        for admission, tokens in share_budget(prompts, 256, chunked=True):
            priority, left = waiting.pop(admission)
            if left > tokens:
                waiting[admission] = (priority, left - tokens)
    assert 0 not in waiting
    assert number > 10, "the others were read meanwhile"
