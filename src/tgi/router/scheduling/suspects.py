"""Who may have killed the shard: search over deaths, so that a poison request fails alone. Knows keys, not entries.

A death with nobody on trial makes all that ran suspects. An eighth of a group (rounded up) goes on trial at a time,
those first who are likely innocent; who yields a token is cleared, and when all on trial are, the next eighth follows.
A death under a trial blames those on trial who were not cleared, and they are divided in turn. The last one left runs
with nobody beside it before it is convicted: it could have been a cleared row, a newcomer, or a row whose client had
gone and which the shard had not left yet. So each poison costs about log8(n) + 2 deaths: a trial that ends well takes a
step, a death takes a restart, of which the launcher allows five.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

PARTS = 8


class Suspects(Generic[K]):
    """`K` stands for a request. All siblings of one prompt are one key: they start, are cleared and fail together."""

    def __init__(self) -> None:
        self._groups: list[dict[K, None]] = []  # held back, in order; the last is looked into, from its front
        self._trial: dict[K, None] = {}  # may run, not yet cleared; in order
        self._is_exclusive = False  # the one on trial runs with nobody beside it

    def __len__(self) -> int:
        return len(self._trial) + sum(map(len, self._groups))

    def holds(self, key: K) -> bool:
        """May it not start now? Newcomers may, but while a last suspect has to run alone."""
        return key not in self._trial and (self._is_exclusive or any(key in group for group in self._groups))

    def clear(self, key: K) -> bool:
        """It has yielded a token. -> was it a suspect, so that others may start now?"""
        return self._end_trial(key)

    def remove(self, key: K) -> bool:
        """It has ended, for whatever reason. -> was it on trial, so that others may start now?"""
        for group in self._groups:
            if key in group:
                del group[key]
        self._groups = [group for group in self._groups if group]
        return self._end_trial(key)

    def died(self, ran: Mapping[K, bool], others_ran: bool = False) -> K | None:
        """The shard died while these ran, oldest first; True: it had yielded a token. -> who is convicted, if anybody.
        `others_ran`: so may have some that nobody asks about any more.

        The convicted one is a suspect no more; the caller ends it.
        """
        blamed = [key for key in ran if key in self._trial]
        untried = [key for key in self._trial if key not in ran]
        culprit: K | None = None
        if len(blamed) == len(ran) == 1 and not others_ran:
            culprit, groups = blamed[0], [untried]
        elif blamed:
            # Newcomers may have done it as well: they are looked into when the blamed are not it.
            groups = [[key for key in ran if key not in self._trial and not ran[key]], untried, blamed]
        else:
            groups = [untried, sorted(ran, key=lambda key: not ran[key])]
        self._is_exclusive = len(blamed) == 1 and culprit is None
        self._groups += [dict.fromkeys(group) for group in groups if group]
        self._trial.clear()
        self._next_trial()
        return culprit

    def _end_trial(self, key: K) -> bool:
        if key not in self._trial:
            return False
        del self._trial[key]
        if not self._trial:
            self._is_exclusive = False
            self._next_trial()
        return True

    def _next_trial(self) -> None:
        if self._groups:
            group = self._groups[-1]
            self._trial = dict.fromkeys(list(group)[: -(-len(group) // PARTS)])
            for key in self._trial:
                del group[key]
            if not group:
                self._groups.pop()
