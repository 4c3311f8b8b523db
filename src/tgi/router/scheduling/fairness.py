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
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from tgi.router.scheduling.entry import Entry

INPUT_WEIGHT = 1  # of a prompt token that is computed; a cached one costs nothing: nobody waits for it
OUTPUT_WEIGHT = 2  # of a token generated: a row's share of a step, for one token, where a prompt fills steps


class Line(OrderedDict[int, "Entry"]):
    """What one client has waiting, by sequence."""


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
    """The accounts of clients that have a request in flight: their entries alone keep them, so names cannot pile up."""

    def __init__(self) -> None:
        self._accounts: WeakValueDictionary[tuple[int, str], Account] = WeakValueDictionary()
        self._last = Account()  # of the client that was the last to leave
        self._floor = 0  # where the clients before it stood when they left

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, priority: int, client: str) -> Account:
        """The client's, or a new one. For the entry to keep."""
        return self._accounts.setdefault((priority, client), Account())

    def join(self, account: Account, waiting: Iterable[Account]) -> None:
        """Its client has something waiting again, beside the `waiting` of its priority."""
        least = min((other.served for other in waiting), default=max(self._floor, self._last.served))
        account.served = max(account.served, least)

    def leave(self, account: Account) -> None:
        """Its client has nothing waiting any more; what it has running still counts."""
        self._floor = max(self._floor, self._last.served)
        self._last = account


def least_served_first(lines: Mapping[str, Line]) -> Iterator[Entry]:
    """All entries, each line's in its own order. Who is charged in between takes the place that this leaves it.

    O(number of lines) once, O(log) of it for each entry. Nothing may join or leave meanwhile.
    """
    heads: list[tuple[int, int, Entry, Iterator[Entry]]] = []
    for line in lines.values():
        rest = iter(line.values())
        head = next(rest)
        heads.append((head.account.served, head.sequence, head, rest))
    heapify(heads)  # sequences differ: entries are never compared
    while heads:
        entry, rest = heads[0][2:]
        yield entry
        following = next(rest, None)
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, (following.account.served, following.sequence, following, rest))
