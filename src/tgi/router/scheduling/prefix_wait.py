"""Who waits for whose prefix: a request stays in the queue while a running row computes what it could share.

Knows rows and their prompts, not the queue: about a waiter it is asked again at every admission.
"""

from __future__ import annotations

from tgi.router.memory.packed import ID_BYTES
from tgi.router.memory.trie import shared_len
from tgi.router.scheduling.budget import SHARING_WORTH
from tgi.router.scheduling.entry import Entry, PrefixWait


class PrefixLeaders:
    """Rows in prefill whose prompt others may share."""

    def __init__(self, block_size: int) -> None:
        self._stride = block_size * ID_BYTES
        self._leaders: dict[tuple[bytes, bytes], list[Entry]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, entry: Entry) -> None:
        if entry.request.use_cache and entry.num_prompt - entry.computed_len >= SHARING_WORTH:
            self._leaders.setdefault(entry.prefix_key, []).append(entry)
            self._size += 1

    def remove(self, entry: Entry) -> None:
        """It has computed its prompt, or it is gone. May be called for an entry that was never added."""
        leaders = self._leaders.get(entry.prefix_key)
        if leaders and entry in leaders:
            leaders.remove(entry)
            self._size -= 1
            if not leaders:
                del self._leaders[entry.prefix_key]
        entry.lent_priority = entry.request.priority

    def must_wait(self, entry: Entry) -> bool:
        """Would it save enough by waiting? Then it lends its priority to the row it waits for.

        Who has begun to wait waits to the end of the common prefix: else many would compute its last tokens, each for
        itself, just before they are there.
        """
        wait = entry.waits_for
        if wait is not None and self._lasts(wait):
            return True
        wait = entry.waits_for = self._best(entry)
        if wait is None:
            return False
        wait.leader.lent_priority = max(wait.leader.lent_priority, entry.request.priority)
        return True

    def _lasts(self, wait: PrefixWait) -> bool:
        leader = wait.leader
        if leader not in self._leaders.get(leader.prefix_key, ()):
            return False
        assert leader.allocation is not None
        return leader.allocation.published_len < wait.length

    def _best(self, entry: Entry) -> PrefixWait | None:
        leaders = self._leaders.get(entry.prefix_key)
        if not leaders or not entry.reads_cache:
            return None
        best: PrefixWait | None = None
        ready_len = 0  # tokens of the common prefix that are in the tree by now
        ids = entry.ids
        limit = len(ids) - ID_BYTES  # at least one position is computed by the row itself
        for leader in leaders:
            assert leader.allocation is not None
            common = shared_len(ids, 0, limit, leader.request.prompt_ids, self._stride) // ID_BYTES
            ready_len = max(ready_len, min(common, leader.allocation.published_len))
            if best is None or common > best.length:
                best = PrefixWait(leader, common)
        return best if best is not None and best.length - ready_len >= SHARING_WORTH else None
