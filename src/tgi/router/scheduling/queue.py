"""Waiting entries: by priority, then those that already ran, then arrival. Knows nothing of memory."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from tgi.router.scheduling.entry import Entry


class _Level:
    """The entries of one priority."""

    __slots__ = ("arrived", "returned")

    def __init__(self) -> None:
        self.returned: list[Entry] = []  # by arrival; few
        self.arrived: OrderedDict[int, Entry] = OrderedDict()  # by sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        """Who goes first, first. The queue must not change meanwhile."""
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            yield from level.returned
            yield from level.arrived.values()

    def append(self, entry: Entry) -> None:
        self._level(entry).arrived[entry.sequence] = entry
        self._size += 1

    def put_back(self, entry: Entry) -> None:
        """An entry that ran returns first among its priority; several by their arrival."""
        entry.returning = True
        insort(self._level(entry).returned, entry, key=lambda other: other.sequence)
        self._size += 1

    def remove(self, entry: Entry) -> None:
        priority = entry.request.priority
        level = self._levels[priority]
        if entry.returning:
            level.returned.remove(entry)
            entry.returning = False
        else:
            del level.arrived[entry.sequence]
        self._size -= 1
        if not level.arrived and not level.returned:
            del self._levels[priority]

    def overdue(self, queued_before: float) -> list[Entry]:
        """Entries that came before a moment and never ran. (Those that ran have sent tokens: they wait on.)"""
        late: list[Entry] = []
        for level in self._levels.values():
            for entry in level.arrived.values():
                if entry.queued_at >= queued_before:
                    break
                late.append(entry)
        return late

    def _level(self, entry: Entry) -> _Level:
        return self._levels.setdefault(entry.request.priority, _Level())
