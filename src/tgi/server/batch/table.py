"""RequestTable: one permanent row per live request, host side. Knows no tensors, no sampling and no text.

A row's sequence, and who knows what of it (positions count from the prompt's first token):

    0            computed        num_ids                    max_len
    |---- KV launched ----|--- remaining ---|---- may come ----|
    |-- given: prompt + resumed ids (host) --|- chosen ids: on the device; the host learns them when it collects -|

`computed` and `num_ids` count what has been *launched*, so they run ahead of what the host has seen by the steps in
flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tgi.shard_client.messages import Admit, Stopping

NO_HANDLE = 0


class RequestTable:
    """Columns by row. Row 0 is scratch (padding) and never given to a request."""

    def __init__(self, max_rows: int, block_size: int) -> None:
        """`max_rows` counts requests; one row more is kept for padding."""
        size = max_rows + 1
        self.block_size = block_size
        self.max_rows = max_rows
        self.handle = np.zeros(size, np.uint64)
        self.live = np.zeros(size, np.bool_)
        self.computed = np.zeros(size, np.int64)
        self.num_ids = np.zeros(size, np.int64)
        self.num_given = np.zeros(size, np.int64)
        self.max_len = np.zeros(size, np.int64)  # prompt + max_new_tokens
        self.num_blocks = np.zeros(size, np.int64)
        self.priority = np.zeros(size, np.int64)
        self.order = np.zeros(size, np.int64)  # admission order
        self.num_scored = np.zeros(size, np.int64)  # ids whose logprobs are wanted: the prompt's, or none
        self.num_scoring = 0  # live rows that have such ids
        self.prompt_top_n = np.zeros(size, np.int64)  # best tokens at each of them
        self.num_left = [0] * size  # ids that the host has still to collect
        self.given: list[npt.NDArray[np.uint32]] = [np.empty(0, np.uint32)] * size
        self.stopping: list[Stopping | None] = [None] * size
        self.end_ids: list[frozenset[int]] = [frozenset()] * size
        self._free = list(range(max_rows, 0, -1))
        self._row_of: dict[int, int] = {}
        self._admitted = 0

    @property
    def num_live(self) -> int:
        return len(self._row_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def row_of(self, handle: int) -> int | None:
        return self._row_of.get(handle)

    def handles(self) -> list[int]:
        return list(self._row_of)

    def num_generated(self, row: int) -> int:
        """Tokens that the host has collected of the row's request, those it came with included."""
        stopping = self.stopping[row]
        assert stopping is not None
        return stopping.max_new_tokens - self.num_left[row]

    def add(self, admit: Admit) -> int:
        """Give the request a row. Raises LookupError when none is free, ValueError when the request breaks the
        contract."""
        given = np.frombuffer(admit.prompt_ids + admit.generated_ids, np.uint32)
        prompt_len = len(admit.prompt_ids) // 4
        num_blocks = len(admit.blocks) // 4
        if admit.handle == NO_HANDLE or admit.handle in self._row_of:
            raise ValueError(f"handle {admit.handle} is in use or zero")
        if not 0 <= admit.cached_len < len(given) or admit.cached_len % self.block_size:
            raise ValueError(
                f"cached_len {admit.cached_len} must be a multiple of {self.block_size} "
                f"and smaller than {len(given)} ids"
            )
        if num_blocks * self.block_size < admit.cached_len + 1:
            raise ValueError(
                f"{num_blocks} blocks of {self.block_size} do not hold {admit.cached_len} cached tokens and one more"
            )
        if len(given) >= prompt_len + admit.stopping.max_new_tokens:
            raise ValueError(f"nothing left to generate after {len(given) - prompt_len} tokens")
        if not self._free:
            raise LookupError("no free row")
        row = self._free.pop()
        self._row_of[admit.handle] = row
        self._admitted += 1
        self.handle[row] = admit.handle
        self.live[row] = True
        self.computed[row] = admit.cached_len
        self.num_ids[row] = self.num_given[row] = len(given)
        self.num_scored[row] = prompt_len if admit.prompt_logprobs else 0
        self.num_scoring += bool(self.num_scored[row])
        self.prompt_top_n[row] = admit.prompt_top_n if admit.prompt_logprobs else 0
        self.max_len[row] = prompt_len + admit.stopping.max_new_tokens
        self.num_left[row] = prompt_len + admit.stopping.max_new_tokens - len(given)
        self.num_blocks[row] = num_blocks
        self.priority[row] = admit.priority
        self.order[row] = self._admitted
        self.given[row] = given
        self.stopping[row] = admit.stopping
        self.end_ids[row] = admit.stopping.end_ids
        return row

    def remove(self, handle: int) -> int | None:
        """The row that the request gave up, or None when the handle is not known (it has ended meanwhile)."""
        row = self._row_of.pop(handle, None)
        if row is None:
            return None
        self.handle[row] = NO_HANDLE
        self.live[row] = False
        self.num_scoring -= bool(self.num_scored[row])
        self.num_scored[row] = 0
        self.given[row] = np.empty(0, np.uint32)
        self._free.append(row)
        return row

    def grow(self, handle: int, num_blocks: int) -> tuple[int, int] | None:
        """(row, blocks it had before), or None when the handle is not known."""
        row = self._row_of.get(handle)
        if row is None:
            return None
        before = int(self.num_blocks[row])
        self.num_blocks[row] = before + num_blocks
        return row, before
