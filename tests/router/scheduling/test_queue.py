"""The order of the waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.scheduling import MemorySink, make_request, open_text
from tgi.router.scheduling.entry import Entry
from tgi.router.scheduling.queue import AGEING_S, WaitingQueue


def entry(sequence: int, priority: int = 0, queued_at: float = 0.0) -> Entry:
    request = make_request(priority=priority)
    return Entry(request, MemorySink(), open_text(request), sequence, queued_at, lambda entry: None)


def order(queue: WaitingQueue) -> list[int]:
    return [entry.sequence for entry in queue]


def test_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for sequence, priority in enumerate((0, 5, 0, -1, 5)):
        queue.append(entry(sequence, priority))
    assert order(queue) == [1, 4, 0, 2, 3]
    assert len(queue) == 5


def test_who_ran_returns_first_among_its_priority_by_arrival() -> None:
    queue = WaitingQueue()
    first, second, urgent = entry(0), entry(1), entry(4, priority=1)
    for new in (entry(2), entry(3), urgent):
        queue.append(new)
    queue.put_back(second)
    queue.put_back(first)
    assert order(queue) == [4, 0, 1, 2, 3]
    queue.remove(first)
    assert not first.returning
    queue.remove(urgent)
    assert order(queue) == [1, 2, 3]
    assert len(queue) == 3


def test_an_empty_priority_leaves_nothing_behind() -> None:
    queue = WaitingQueue()
    for priority in range(50):
        waiting = entry(priority, priority)
        queue.append(waiting)
        queue.remove(waiting)
    assert not queue
    assert queue._levels == {}


def test_overdue_are_those_who_never_ran() -> None:
    queue = WaitingQueue()
    late, later, ran = entry(0, queued_at=1.0), entry(1, queued_at=5.0), entry(2, queued_at=0.0)
    urgent = entry(3, priority=3, queued_at=2.0)
    for new in (late, later, urgent):
        queue.append(new)
    queue.put_back(ran)
    assert {waiting.sequence for waiting in queue.overdue(5.0)} == {0, 3}


# -- ageing ------------------------------------------------------------------------------------------------------------


def aged(*priorities: int) -> tuple[WaitingQueue, list[Entry], list[float]]:
    """A queue with one entry of each priority, and its clock."""
    now = [0.0]
    queue = WaitingQueue(lambda: now[0])
    entries = [entry(sequence, priority) for sequence, priority in enumerate(priorities)]
    for new in entries:
        queue.append(new)
    return queue, entries, now


def start(queue: WaitingQueue, waiting: Entry) -> None:
    queue.serve(waiting, 1)
    queue.remove(waiting)


def test_what_has_waited_for_long_ranks_with_the_next_higher() -> None:
    queue, (low, *_), now = aged(0)
    now[0] = AGEING_S - 0.001
    for sequence in (1, 2):
        queue.append(entry(sequence, 5))
    assert order(queue) == [1, 2, 0]
    now[0] = AGEING_S
    assert order(queue) == [0, 1, 2]
    now[0] = 100 * AGEING_S
    assert order(queue)[0] == 0
    assert low.priority == 0, "it has not started"


def test_a_clock_that_was_set_back_ages_nothing() -> None:
    queue, _, now = aged(0, 5, 9)
    now[0] = -100 * AGEING_S
    assert order(queue) == [2, 1, 0]


def test_one_turn_and_the_priority_waits_again() -> None:
    queue, _, now = aged(0, 0, 0)
    now[0] = AGEING_S
    for sequence in range(3, 6):
        queue.append(entry(sequence, 7))
    seen: list[int] = []
    for waiting in queue:
        queue.serve(waiting, 1)
        seen.append(waiting.sequence)
    assert seen == [0, 3, 4, 5, 1, 2]


def test_it_climbs_one_rank_at_a_time_however_far_the_numbers_lie_apart() -> None:
    queue, _, now = aged(-(2**31), 0)
    now[0] = AGEING_S / 2
    queue.append(entry(2, 2**31 - 1))
    assert order(queue) == [2, 1, 0]
    now[0] = AGEING_S
    assert order(queue) == [1, 2, 0], "0 ranks with the highest and has waited for longer, the lowest ranks with 0"
    now[0] = 2 * AGEING_S
    queue.append(entry(3, 2**31 - 1))
    assert order(queue) == [1, 0, 2, 3], "as long as the other, and of the lower priority"


def test_who_started_by_ageing_keeps_what_it_had_risen_to() -> None:
    """Else the first of those that it went before would make it give way again."""
    queue, (low,), now = aged(0)
    now[0] = AGEING_S
    high = entry(1, 5)
    queue.append(high)
    for waiting in queue:
        queue.serve(waiting, 1)
    assert (low.priority, high.priority) == (5, 5)
    assert low.seniority < high.seniority


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(1, 4))
def test_a_stream_of_higher_ones_starves_nobody(priorities: list[int], every: int) -> None:
    """A newcomer of the highest priority every second, and one start a second: all get their turn."""
    queue, entries, now = aged(*priorities)
    left = {waiting.sequence for waiting in entries}
    bound = len(entries) * (AGEING_S * len(set(priorities)) + 2 * len(set(priorities)) + 2)
    sequence = len(entries)
    while left:
        now[0] += 1.0
        assert now[0] <= bound, "it starves"
        for _ in range(every):
            queue.append(entry(sequence, 9))
            sequence += 1
        first = next(iter(queue))
        start(queue, first)
        left.discard(first.sequence)


def test_without_anything_higher_nothing_rises() -> None:
    queue, entries, now = aged(2, 2)
    now[0] = 50 * AGEING_S
    assert order(queue) == [0, 1]
    for waiting in queue:
        queue.serve(waiting, 1)
    assert [waiting.priority for waiting in entries] == [2, 2]
