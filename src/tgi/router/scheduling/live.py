"""The running requests, by handle, and the blocks they hold. Decides nothing; knows no queue and no stream."""

from __future__ import annotations

from collections.abc import Iterator

from tgi.router.memory.allocator import Allocation
from tgi.router.scheduling.entry import NEVER, Entry, State

LAST_HANDLE = (1 << 64) - 1  # u64 on the wire


class LiveRows:
    """Entries that have a row in the shard. Gives out handles: they count up and are never used twice (rule 4)."""

    def __init__(self, next_handle: int = 1) -> None:
        self.next_handle = next_handle
        self.room = 0  # tokens, all rows together
        self._rows: dict[int, Entry] = {}
        self.get = self._rows.get  # the hot path: one look per row and step

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Entry]:
        """In the order of admission."""
        return iter(self._rows.values())

    @property
    def has_handles(self) -> bool:
        return self.next_handle <= LAST_HANDLE

    def add(self, entry: Entry, allocation: Allocation, block_size: int, window: int) -> None:
        entry.state = State.LIVE
        entry.handle = self.next_handle
        self.next_handle += 1
        entry.allocation = allocation
        entry.computed_len = allocation.cached_len
        entry.decoding = False
        entry.room = 0
        self._rows[entry.handle] = entry
        self.set_room(entry, block_size, window)

    def set_room(self, entry: Entry, block_size: int, window: int) -> None:
        """After its blocks became more."""
        assert entry.allocation is not None
        room = entry.allocation.num_blocks * block_size
        self.room += room - entry.room
        entry.room = room
        entry.grow_at = NEVER if room >= entry.limit else room - window

    def remove(self, entry: Entry) -> tuple[int, Allocation]:
        """The row ends here, whatever the shard still computes for it. -> handle, and blocks for the caller to free."""
        handle, allocation = entry.handle, entry.allocation
        assert allocation is not None
        del self._rows[handle]
        self.room -= entry.room
        entry.allocation = None
        entry.handle = entry.room = 0
        return handle, allocation

    def allocations(self) -> list[Allocation]:
        return [entry.allocation for entry in self if entry.allocation is not None]
