"""The order of the waiting."""

from __future__ import annotations

from tests.fakes.scheduling import MemorySink, make_request, open_text
from tgi.router.scheduling.entry import Entry
from tgi.router.scheduling.queue import WaitingQueue


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
