"""Waiting entries: by priority, then those that already ran, then clients by what they were served, then arrival.

A priority ages as a whole: for each AGEING_S that it has something waiting and gets nothing started it ranks one higher
among those that wait, until it has had its turn. Single entries do not age: a client could then gain by queueing much.
Knows nothing of memory.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace

from tgi.router.scheduling.entry import Entry
from tgi.router.scheduling.fairness import Ledger, Lines

AGEING_S = 10.0  # what waits for this long without a turn ranks with the next higher priority


class _Level:
    """The entries of one priority. Never empty while it is in the queue."""

    __slots__ = ("lines", "priority", "returned", "risen", "waits_since")

    def __init__(self, priority: int, now: float) -> None:
        self.priority = priority
        self.waits_since = now  # it has had nothing started
        self.risen = priority  # where ageing had brought it when the queue was last looked through
        self.returned: list[Entry] = []  # by arrival; few
        self.lines = Lines()

    def __iter__(self) -> Iterator[Entry]:
        yield from self.returned
        yield from self.lines


class WaitingQueue:
    """`clock` as that of the entries' `queued_at`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._levels: dict[int, _Level] = {}
        self._ledger = Ledger()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        """Who goes first, first; whoever `serve` is called for in between counts. Nothing may join or leave meanwhile.

        Each priority's own order holds; a look costs O(priorities), and O(log) of them and of the clients for each
        entry.
        """
        now = self._clock()
        levels = [self._levels[priority] for priority in sorted(self._levels, reverse=True)]
        waiting: list[tuple[int, float, int, Iterator[Entry]]] = []
        for rank, level in enumerate(levels):
            reached = max(0, rank - int(max(0.0, now - level.waits_since) / AGEING_S))
            level.risen = levels[reached].priority
            # Of those that rank the same, who waits for longest: the priority itself has mostly had its turn of late.
            waiting.append((reached, level.waits_since if reached < rank else now, rank, iter(level)))
        heapify(waiting)
        while waiting:
            _, _, rank, entries = waiting[0]
            level = levels[rank]
            since = level.waits_since
            entry = next(entries, None)
            if entry is None:
                heappop(waiting)
                continue
            yield entry
            if level.waits_since != since:
                level.risen = level.priority
                heapreplace(waiting, (rank, now, rank, entries))

    def append(self, entry: Entry) -> None:
        level, client = self._level(entry), entry.request.client
        entry.account = self._ledger.account(level.priority, client)
        if client not in level.lines:
            self._ledger.join(entry.account, level.lines.least_served())
        level.lines.add(client, entry)
        self._size += 1

    def put_back(self, entry: Entry) -> None:
        """An entry that ran returns first among its priority, whoever its client is; several by their arrival."""
        entry.returning = True
        insort(self._level(entry).returned, entry, key=lambda other: other.sequence)
        self._size += 1

    def serve(self, entry: Entry, num_computed: int) -> None:
        """It starts, with `num_computed` tokens to compute: its priority has had a turn. To be removed after the look.

        Who gave way before is not charged again for what is computed twice: that was not its doing.
        """
        level = self._levels[entry.request.priority]
        level.waits_since = self._clock()
        entry.priority = max(entry.priority, level.risen)
        if not entry.returning:
            entry.account.charge_prompt(num_computed)

    def remove(self, entry: Entry) -> None:
        priority, client = entry.request.priority, entry.request.client
        level = self._levels[priority]
        if entry.returning:
            level.returned.remove(entry)
            entry.returning = False
        else:
            level.lines.remove(client, entry)
            if client not in level.lines:
                self._ledger.leave(entry.account)
        self._size -= 1
        if not level.lines and not level.returned:
            del self._levels[priority]

    def overdue(self, queued_before: float) -> list[Entry]:
        """Entries that came before a moment and never ran. (Those that ran have sent tokens: they wait on.)"""
        late: list[Entry] = []
        for level in self._levels.values():
            for line in level.lines.values():
                for entry in line.values():
                    if entry.queued_at >= queued_before:
                        break
                    late.append(entry)
        return late

    def _level(self, entry: Entry) -> _Level:
        priority = entry.request.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(priority, self._clock())
        return level
