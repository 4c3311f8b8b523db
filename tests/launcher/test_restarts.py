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
        restart = restarts.next()
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
    assert [restart is not None for restart in (looping.next() for _ in range(6))] == [True] * 5 + [False]
    assert looping.next() is None, "asking again is no way around it"
    for _ in range(1000):
        clock.now += 1.0
        working.note_finished()
        restart = working.next()
        assert restart is not None
        assert (restart.number, restart.delay_s) == (1, 0.0)


def test_pauses_double() -> None:
    assert [delay_s(number) for number in range(1, 7)] == [0, 0.5, 1, 2, 4, 8]
