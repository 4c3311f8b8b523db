"""Who waits for whose prefix: a request stays in the queue while a running row computes what it could share.

Knows rows and their prompts, not the queue: a waiter is asked for again at every admission.
"""

from __future__ import annotations

from tgi.router.memory.packed import ID_BYTES
from tgi.router.memory.trie import shared_len
from tgi.router.scheduling.budget import SHARING_WORTH
from tgi.router.scheduling.entry import Entry

_HEAD = SHARING_WORTH * ID_BYTES  # less in common than this is not worth waiting for


class PrefixLeaders:
    """Rows in prefill whose prompt others may share, by what a sharer must have in common with them at least."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leaders: dict[tuple[bytes, bytes], list[Entry]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, entry: Entry) -> None:
        if entry.request.use_cache and entry.num_prompt - entry.computed_len >= SHARING_WORTH:
            self._leaders.setdefault(self._key(entry), []).append(entry)
            self._size += 1

    def remove(self, entry: Entry) -> None:
        """It has computed its prompt, or it is gone. May be called for an entry that was never added."""
        leaders = self._leaders.get(self._key(entry))
        if leaders and entry in leaders:
            leaders.remove(entry)
            self._size -= 1
            if not leaders:
                del self._leaders[self._key(entry)]
        entry.lent_priority = entry.request.priority

    def must_wait(self, entry: Entry) -> bool:
        """Would it save enough by waiting? Then it lends its priority to the row it waits for."""
        if not self._leaders or not entry.reads_cache:
            return False
        best, best_len, ready_len = None, 0, 0
        ids = entry.ids
        limit = (len(ids) - 1) // ID_BYTES  # tokens; at least one is computed by the row itself
        for leader in self._leaders.get(self._key(entry), ()):
            assert leader.allocation is not None
            stride = self._block_size * ID_BYTES
            common = shared_len(ids, 0, limit * ID_BYTES, leader.request.prompt_ids, stride) // ID_BYTES
            ready_len = max(ready_len, min(common, leader.allocation.published_len))
            if common > best_len:
                best, best_len = leader, common
        if best is None or best_len - ready_len < SHARING_WORTH:
            return False
        best.lent_priority = max(best.lent_priority, entry.request.priority)
        return True

    def _key(self, entry: Entry) -> tuple[bytes, bytes]:
        return (entry.namespace, entry.request.prompt_ids[:_HEAD])
