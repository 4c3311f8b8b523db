"""How often and how soon what has died is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tgi.launcher.restarts import LIMIT, WINDOW_S, Restarts, delay_s

# A death after so many seconds, and whether a request has finished before it.
deaths = st.lists(st.tuples(st.floats(0.0, WINDOW_S), st.booleans()), max_size=60)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(deaths)
def test_five_within_ten_minutes_unless_a_request_finishes(deaths: list[tuple[float, bool]]) -> None:
    """Against the rule as it is told: look back over all restarts that there have been."""
    clock = Clock()
    restarts = Restarts(clock)
    since_finished: list[float] = []
    for seconds, finished in deaths:
        clock.now += seconds
        if finished:
            restarts.note_finished()
            since_finished = []
        recent = [moment for moment in since_finished if clock.now - moment < WINDOW_S]
        restart = restarts.next("the shards")
        if len(recent) >= LIMIT:
            assert restart is None
        else:
            assert restart is not None
            assert restart.number == len(recent) + 1
            assert restart.delay_s == [0, 0.5, 1, 2, 4][len(recent)]
            since_finished.append(clock.now)


def test_a_crash_loop_ends_and_a_server_that_works_does_not() -> None:
    clock = Clock()
    looping, working = Restarts(clock), Restarts(clock)
    assert [restart is not None for restart in (looping.next("the shards") for _ in range(6))] == [True] * 5 + [False]
    assert looping.next("the shards") is None, "asking again is no way around it"
    for _ in range(1000):
        clock.now += 1.0
        working.note_finished()
        restart = working.next("the shards")
        assert restart is not None
        assert (restart.number, restart.delay_s) == (1, 0.0)


def test_pauses_double() -> None:
    assert [delay_s(number) for number in range(1, 7)] == [0, 0.5, 1, 2, 4, 8]


def test_two_programs_that_die_together_count_once() -> None:
    clock = Clock()
    restarts = Restarts(clock)

    def number(program: str) -> int:
        restart = restarts.next(program)
        assert restart is not None
        return restart.number

    assert [number("the shards"), number("the webserver")] == [1, 1]
    clock.now += 0.5
    assert [number("the shards"), number("the webserver")] == [2, 2], "the same program again is another death"
    clock.now += 1.5
    assert number("the webserver") == 3
    restarts.note_finished()
    assert number("the shards") == 1
