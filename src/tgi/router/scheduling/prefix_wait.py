"""Who waits for whose prefix: a request stays in the queue while a running row computes what it could share.

That must be worth it: SHARING_WORTH tokens, or one block for siblings, who have their whole prompt in common. Knows
rows and their prompts, not the queue: about a waiter it is asked again at every admission.
"""

from __future__ import annotations

from tgi.router.memory.node import shared_len
from tgi.router.memory.packed import ID_BYTES
from tgi.router.scheduling.budget import SHARING_WORTH
from tgi.router.scheduling.entry import Entry, PrefixWait


class PrefixLeaders:
    """Rows in prefill whose prompt others may share."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._stride = block_size * ID_BYTES
        self._leaders: dict[tuple[bytes, bytes], list[Entry]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, entry: Entry) -> None:
        if entry.request.use_cache and self._has_to_share(entry):
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
        if wait is None or not self._lasts(wait):
            wait = entry.waits_for = self._best(entry)
        if wait is None:
            return False
        wait.leader.lent_priority = max(wait.leader.lent_priority, entry.priority)
        return True

    def _lasts(self, wait: PrefixWait) -> bool:
        leader = wait.leader
        if leader not in self._leaders.get(leader.prefix_key, ()):
            return False
        assert leader.allocation is not None
        return leader.allocation.published_len < wait.length

    def _has_to_share(self, entry: Entry) -> bool:
        """Will its row compute enough that is not in the tree yet? (A sibling computes the last position itself.)"""
        left = entry.num_prompt - entry.computed_len
        return left >= SHARING_WORTH or (entry.request.siblings is not None and left > self._block_size)

    def _best(self, entry: Entry) -> PrefixWait | None:
        """The longest wait that is worth it."""
        leaders = self._leaders.get(entry.prefix_key)
        if not leaders or not entry.reads_cache:
            return None
        ids = entry.ids
        limit = len(ids) - ID_BYTES  # at least one position is computed by the row itself
        waits: list[PrefixWait] = []
        ready_len = 0  # tokens of the common prefix that are in the tree by now
        for leader in leaders:
            assert leader.allocation is not None
            common = shared_len(ids, 0, limit, leader.request.prompt_ids, self._stride) // ID_BYTES
            ready_len = max(ready_len, min(common, leader.allocation.published_len))
            waits.append(PrefixWait(leader, common))
        worthy = [wait for wait in waits if wait.length - ready_len >= self._worth(entry, wait.leader)]
        return max(worthy, key=lambda wait: wait.length, default=None)

    def _worth(self, entry: Entry, leader: Entry) -> int:
        """Tokens that the one must save at least by waiting for the other."""
        siblings = entry.request.siblings
        return self._block_size if siblings is not None and siblings is leader.request.siblings else SHARING_WORTH
