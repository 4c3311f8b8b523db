"""Who gets blocks when they are short, and who gives way. Decides over one Step; sends nothing.

Order: the oldest row first, then by priority, then by arrival. A row that would really stop makes one behind it in this
order give way, the last one first; so the oldest always advances, and no two rows wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tgi.router.memory.allocator import Allocator
from tgi.router.scheduling.budget import blocks_for, room_wanted, would_stop
from tgi.router.scheduling.entry import Entry, State


class GrowthRules(NamedTuple):
    """What an opening says about growth. `window` in tokens, as from budget.window_tokens."""

    block_size: int
    window: int
    speculated: int


def blocks_wanted(entry: Entry, rules: GrowthRules) -> int:
    wanted = room_wanted(entry.num_tokens, entry.room, rules.window, entry.limit)
    return blocks_for(wanted, rules.block_size) - entry.room // rules.block_size


def grant(
    short: Iterable[Entry],
    rows: Iterable[Entry],
    allocator: Allocator,
    rules: GrowthRules,
    give: Callable[[Entry, int], None],
    preempt: Callable[[Entry], None],
) -> list[Entry]:
    """Give the `short` ones their blocks, from free and unused ones first. -> who is short still.

    `give` and `preempt` act at once: afterwards the allocator, the rows and the entries' states are up to date.
    """
    wanted = [(entry, blocks_wanted(entry, rules)) for entry in short if entry.state is State.LIVE]
    if sum(count for _, count in wanted) <= allocator.num_available:
        for entry, count in wanted:
            if count:
                give(entry, count)
        return []
    oldest = min(rows, key=lambda entry: entry.sequence)
    wanted.sort(key=lambda pair: _rank(pair[0], oldest))
    still_short: list[Entry] = []
    for entry, count in wanted:
        if entry.state is not State.LIVE:
            continue  # gave way to one before it
        while _stops(entry, min(count, allocator.num_available), rules):
            victim = max(rows, key=lambda row: _rank(row, oldest))
            if victim is entry:
                break  # all others go first: it sits out, the rest goes on
            preempt(victim)
        given = min(count, allocator.num_available)
        if given:
            give(entry, given)
        if given < count:
            still_short.append(entry)
    return still_short


def _stops(entry: Entry, num_blocks: int, rules: GrowthRules) -> bool:
    return would_stop(entry.num_tokens, entry.room + num_blocks * rules.block_size, rules.speculated, entry.limit)


def _rank(entry: Entry, oldest: Entry) -> tuple[bool, int, int]:
    return (entry is not oldest, *entry.seniority)
