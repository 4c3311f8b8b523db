"""Queue, rows and memory -> who starts now. Sends nothing.

Order: as the queue says. It hears of each start at once, since that may change who is next. One that does not fit lets
others go first, but only so many: then the line waits for it. One that already ran lets nobody go first, so a full pool
never trades it for a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable

from tgi.router.memory.allocator import Allocator
from tgi.router.scheduling.budget import admission_reserve, least_admission, room_wanted
from tgi.router.scheduling.entry import Entry
from tgi.router.scheduling.live import LiveRows
from tgi.router.scheduling.prefix_wait import PrefixLeaders
from tgi.router.scheduling.queue import WaitingQueue

MAX_PASSED_OVER = 32  # younger ones that may go before one that does not fit
MAX_MISFITS = 8  # tried and found too large in one pass; the rest waits for the next
MAX_SHARERS = 1_000  # looked at in one pass though they wait for a prefix: 2 ms; the rest waits with them


class PrefillGate:
    """Holds newcomers back where their prefill would stop the running rows (models that cannot chunk it)."""

    def __init__(self, waiting_served_ratio: float, max_waiting_tokens: int) -> None:
        self._ratio = waiting_served_ratio
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting_tokens = 1  # and the decode steps since the last admission, counted as TGI does

    def count_steps(self, steps: int) -> None:
        self._waiting_tokens += steps

    def opens(self, num_waiting: int, num_rows: int) -> str | None:
        """Why newcomers may join now, in the words of `tgi_batch_concat`; None: they may not."""
        least = least_admission(num_rows, self._waiting_tokens, self._ratio, self._max_waiting_tokens)
        if least is None:
            return "wait_exceeded"
        return "backpressure" if num_waiting >= least else None

    def admitted(self) -> None:
        self._waiting_tokens = 1


def admit_waiting(
    queue: WaitingQueue,
    rows: LiveRows,
    leaders: PrefixLeaders,
    allocator: Allocator,
    max_rows: int,
    window: int,
    start: Callable[[Entry], None],
    max_prefill: int | None = None,
    is_held: Callable[[Entry], bool] = lambda entry: False,
) -> bool:
    """Move entries from the queue to the rows as long as they fit. `start` is told of each, who `is_held` stays.

    `max_prefill`: tokens that those of one call may have to compute together; one that has more goes alone. -> did
    that limit stop somebody, who can go at the next call?
    """
    if len(rows) >= max_rows:
        return False  # before the queue is looked through
    block_size = allocator.block_size
    admitted: list[Entry] = []
    misfits: list[Entry] = []
    num_prefill = 0
    num_sharers = 0
    is_cut = False
    try:
        for entry in queue:
            if len(rows) >= max_rows or not rows.has_handles or len(misfits) >= MAX_MISFITS:
                break
            if is_held(entry):
                continue
            if leaders.must_wait(entry):
                num_sharers += 1
                if num_sharers >= MAX_SHARERS:
                    break
                continue
            allocation = allocator.allocate(
                entry.ids,
                max(entry.num_tokens, room_wanted(entry.num_tokens, 0, window, entry.limit)),
                namespace=entry.namespace,
                read=entry.reads_cache,
                reserve=admission_reserve(len(rows), block_size),
            )
            if allocation is None:
                if entry.returning or entry.passed_over >= MAX_PASSED_OVER:
                    break
                misfits.append(entry)
                continue
            num_computed = entry.num_tokens - allocation.cached_len
            num_prefill += num_computed
            if max_prefill is not None and admitted and num_prefill > max_prefill:
                allocator.free(allocation)
                is_cut = True
                break
            rows.add(entry, allocation, block_size, window)
            admitted.append(entry)
            queue.serve(entry, num_computed)
            if allocator.shares:
                leaders.add(entry)
            for misfit in misfits:
                misfit.passed_over += 1
    finally:
        # Also after a fault of ours: an entry with a row that stayed queued would run a second time.
        for entry in admitted:
            queue.remove(entry)
            entry.passed_over = 0
    for entry in admitted:
        start(entry)
    return is_cut
