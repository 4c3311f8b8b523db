"""What each client was served, in weighted tokens, and who is therefore next. Knows no memory, no rows and no clock.

A Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): who has been served
least goes first, and who comes back from a pause is lifted to the least of those who wait, so that nobody saves up.
Of two clients that always have something waiting, neither gets ahead of the other by more than their largest prompt, or
what all rows may generate while one of them cannot start: a constant of the server, however long they compete. (Those
that admission lets pass one that does not fit come on top; they are counted there.)

Each priority has counters of its own: clients are only ever compared with those of the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from tgi.router.scheduling.entry import Entry

INPUT_WEIGHT = 1  # of a prompt token that is computed; a cached one costs nothing: nobody waits for it
OUTPUT_WEIGHT = 2  # of a token generated: a row's share of a step, for one token, where a prompt fills steps
MOST_REMEMBERED = 1_024  # clients that have nothing in flight: who asks again at once still has been served


FEW = 64  # lines; so few may be empty without need to clear up

Place = tuple[int, int]  # weighted tokens, arrival


class Line(OrderedDict[int, "Entry"]):
    """What one client has waiting, by sequence."""

    @property
    def head(self) -> Entry:
        return next(iter(self.values()))

    @property
    def place(self) -> Place:
        """Never gets smaller."""
        return place_of(self.head)


def place_of(head: Entry) -> Place:
    """Of a line, by the first in it: smaller goes first."""
    return head.account.served, head.sequence


class Account:
    """One client at one priority."""

    __slots__ = ("__weakref__", "served")

    def __init__(self) -> None:
        self.served = 0  # weighted tokens; only compared with others'

    def charge_prompt(self, num_computed: int) -> None:
        self.served += INPUT_WEIGHT * num_computed

    def charge_token(self) -> None:
        self.served += OUTPUT_WEIGHT


class Ledger:
    """The accounts of clients that have a request in flight, which its entry keeps, and of the last that had one. So
    names cannot pile up."""

    def __init__(self) -> None:
        self._accounts: WeakValueDictionary[tuple[int, str], Account] = WeakValueDictionary()
        self._left: OrderedDict[Account, None] = OrderedDict()  # had nothing waiting any more, the last one last
        self._last = Account()  # of the client that was the last to leave
        self._floor = 0  # where the clients before it stood when they left

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, priority: int, client: str) -> Account:
        """The client's, or a new one. For the entry to keep."""
        return self._accounts.setdefault((priority, client), Account())

    def join(self, account: Account, least: Account | None) -> None:
        """Its client has something waiting again. `least`: of those of its priority that wait, who was served least."""
        lowest = max(self._floor, self._last.served) if least is None else least.served
        account.served = max(account.served, lowest)

    def leave(self, account: Account) -> None:
        """Its client has nothing waiting any more; what it has running still counts."""
        self._floor = max(self._floor, self._last.served)
        self._last = account
        self._left[account] = None
        self._left.move_to_end(account)
        if len(self._left) > MOST_REMEMBERED:
            self._left.popitem(last=False)


class Lines:
    """The lines of one priority, none of them empty. No look costs more than O(log) of their number for each entry.

    Kept as a heap by the place that each had when it was last looked at. Places never get smaller: whoever comes first
    in the heap is the first of all as soon as its own place is right.
    """

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._heap: list[tuple[Place, Line]] = []  # with empty lines, until they come to the front or are too many

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, client: str) -> bool:
        return client in self._lines

    def __iter__(self) -> Iterator[Entry]:
        """All entries, least served first, each line's in its own order. Who is charged in between takes the place that
        this leaves it. Nothing may join or leave meanwhile."""
        self._settle()
        heap = self._heap
        # What comes next: where in the heap, for lines not looked at; an entry and what is behind it, for the others.
        # No two have the same place.
        front: list[tuple[Place, int, Entry | None, Iterator[Entry]]] = []
        front += [(place, 0, None, iter(())) for place, _ in heap[:1]]
        while front:
            _, index, entry, rest = heappop(front)
            if entry is None:
                for child in (2 * index + 1, 2 * index + 2):
                    if child < len(heap):
                        heappush(front, (heap[child][0], child, None, rest))
                rest = iter(heap[index][1].values())
            else:
                yield entry
            following = next(rest, None)
            if following is not None:
                heappush(front, (place_of(following), index, following, rest))

    def values(self) -> Iterable[Line]:
        return self._lines.values()

    def least_served(self) -> Account | None:
        """Of those that have a line; None: nobody has."""
        self._settle()
        return self._heap[0][1].head.account if self._heap else None

    def add(self, client: str, entry: Entry) -> None:
        """To the end of its client's line. It has its account, which has joined."""
        line = self._lines.get(client)
        if line is not None:
            line[entry.sequence] = entry
            return
        line = self._lines[client] = Line({entry.sequence: entry})
        heappush(self._heap, (line.place, line))

    def remove(self, client: str, entry: Entry) -> None:
        line = self._lines[client]
        del line[entry.sequence]
        if not line:
            del self._lines[client]
            if len(self._heap) > 2 * len(self._lines) + FEW:
                self._heap = [(line.place, line) for line in self._lines.values()]
                heapify(self._heap)

    def _settle(self) -> None:
        """Have the first of the heap be the first of all."""
        heap = self._heap
        while heap:
            place, line = heap[0]
            if not line:
                heappop(heap)
            elif line.place != place:
                heapreplace(heap, (line.place, line))
            else:
                return
