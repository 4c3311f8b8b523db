"""SchedulerCore: the scheduler without sockets, tasks or clocks of its own. Steps in, Commands out, events to sinks.

One pass decides everything that a Step or a submission changes, in this order: who gets further blocks, who gives way
for them, who starts. What it decides leaves in one Command (rule 6): the shard never sees a decision half made.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tgi.errors import ContextTooLong, GenerationFailed, InvalidRequest, Overloaded, TgiError
from tgi.router.backend import Flushed, Sink
from tgi.router.memory.allocator import Allocation, Allocator
from tgi.router.memory.radix import RadixAllocator
from tgi.router.memory.simple import SimpleAllocator
from tgi.router.scheduling.admission import PrefillGate, admit_waiting
from tgi.router.scheduling.block_moves import UnconfirmedMoves
from tgi.router.scheduling.budget import blocks_for, window_tokens
from tgi.router.scheduling.entry import AnswerText, Entry, State, Vocabulary
from tgi.router.scheduling.live import LAST_HANDLE, LiveRows
from tgi.router.scheduling.preemption import GrowthRules, grant
from tgi.router.scheduling.prefix_wait import PrefixLeaders
from tgi.router.scheduling.queue import WaitingQueue
from tgi.router.scheduling.stats import Method, SchedulerStats
from tgi.router.scheduling.step_handler import StepHandler
from tgi.router.scheduling.suspects import Suspects
from tgi.router.validation.request import Siblings, ValidRequest
from tgi.shard_client.messages import Admit, BlockMoves, Command, Opening, Step

logger = logging.getLogger(__name__)

MAX_BARREN_CUTS = 3  # streams that may break under a request without a token before somebody must be at fault
MAX_BARREN_LOSSES = 20  # of any kind: more than it takes to find a poison among 100,000, so nothing goes on for ever


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`num_blocks` and `block_size` as warm-up told; an Opening that says otherwise stands."""

    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    speculate: int = 0
    supports_chunking: bool = True
    waiting_served_ratio: float = 0.3  # all three only where prefill cannot be chunked
    max_waiting_tokens: int = 20
    max_batch_prefill_tokens: int | None = None
    queue_timeout_s: float | None = None
    unavailable_after_s: float = 30.0  # new requests are refused when the shard has been away for longer


class SchedulerCore:
    """Owns queue, rows, allocator and what the next Command will say. One caller at a time: the event loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        vocabulary: Vocabulary,
        open_text: Callable[[ValidRequest], AnswerText],
        clock: Callable[[], float] = time.perf_counter,
        next_handle: int = 1,
    ) -> None:
        self.stats = SchedulerStats()
        self.queue = WaitingQueue(clock)
        self.rows = LiveRows(next_handle)
        self.allocator: Allocator = _make_allocator(config.prefix_caching, config.num_blocks, config.block_size)
        self._config = config
        self._eos_ids = tuple(vocabulary.eos_ids)
        self._open_text = open_text
        self._clock = clock
        self._suspects: Suspects[Siblings | Entry] = Suspects()
        self._lost: list[tuple[Entry, bool]] = []  # ran when the stream was lost; True: had yielded a token
        self._left_at: int | None = None  # last Step before a row was taken from the shard, which may run it still
        self._others_ran = False  # such a row may have when the stream was lost
        self._steps = StepHandler(self.rows, vocabulary, self.stats, clock, self._finish, self._fail, self._clear)
        self._leaders = PrefixLeaders(config.block_size)
        self._gate = PrefillGate(config.waiting_served_ratio, config.max_waiting_tokens)
        self._found_by_first: WeakKeyDictionary[Siblings, int] = WeakKeyDictionary()  # cached tokens
        self._next_sequence = 0
        self._max_tokens = float("inf")  # of one request, whatever the pool holds
        # Of the present stream; None while there is none.
        self._opening: Opening | None = None
        self._kv_epoch: int | None = None  # of what the allocator believes in
        self._last_epoch: int | None = None  # of the shard; None before the first stream
        self._rules = GrowthRules(config.block_size, 0, config.speculate)
        self._is_mid_step = False
        self._seen = 0  # last Step handled
        self._said = 0  # and last told
        self._blocks_before: Counter[str] = Counter()  # as counted by the allocators before this one
        self._moves = UnconfirmedMoves()
        # What the next pass has to do, and what it has decided.
        self._may_admit = True  # somebody may start who could not at the last pass
        self._short: dict[int, Entry] = {}  # rows that want blocks, by handle
        self._cancel: list[int] = []
        self._grow: list[tuple[int, bytes]] = []
        self._admit: list[Admit] = []

    # -- the doors' side -----------------------------------------------------------------------------------------------

    def submit(self, request: ValidRequest, sink: Sink, cancel: Callable[[Entry], None] | None = None) -> Entry:
        """Queue a request. Raises InvalidRequest or ContextTooLong when it could not run even alone.

        `cancel` is what the entry's own cancel() calls, if not `self.cancel`.
        """
        if not request.prompt_ids:
            raise InvalidRequest("`inputs` cannot be empty", "inputs")
        if request.stopping.max_new_tokens < 1:
            raise InvalidRequest("`max_new_tokens` must be strictly positive", "max_new_tokens")
        entry = Entry(
            request, sink, self._open_text(request), self._next_sequence, self._clock(), cancel or self.cancel
        )
        if not self._fits_alone(entry):
            raise ContextTooLong(
                f"`inputs` tokens + `max_new_tokens` must be <= {min(self._pool_tokens, self._max_tokens)}, what the "
                f"model server has room for. Given: "
                f"{entry.num_prompt} `inputs` tokens and {request.stopping.max_new_tokens} `max_new_tokens`",
                "max_new_tokens",
            )
        self._next_sequence += 1
        self.queue.append(entry)
        self._may_admit = True
        self.stats.queue_size = len(self.queue)
        return entry

    def cancel(self, entry: Entry) -> None:
        """The client is gone: nothing more is sent, row and blocks are free at once. Ended entries stay as they are."""
        if entry.state is State.ENDED:
            return
        self._withdraw(entry, tell_shard=True)
        self.stats.dropped += 1

    def expire(self) -> None:
        """Fail who has waited in the queue longer than the queue timeout."""
        timeout = self._config.queue_timeout_s
        if timeout is None:
            return
        for entry in self.queue.overdue(self._clock() - timeout):
            if entry.request.siblings in self._found_by_first:
                continue  # a sibling has begun: the request as a whole no longer waits in the queue
            self._fail(entry, Overloaded(f"the request waited in the queue for more than {timeout:g} s"), False)

    def fail_all(self, error: TgiError) -> None:
        """The end of service: every request gets its answer."""
        for entry in [*self.rows, *self.queue]:
            self._fail(entry, error, True)

    def limit_lengths(self, max_tokens: int) -> None:
        """What a request may have, prompt and answer: a shard that was started again may allow less. Whoever wants more
        fails when its stream opens."""
        self._max_tokens = max_tokens

    def flush_cache(self) -> Flushed:
        """Empty the prefix tree of what no row uses."""
        count = self.allocator.flush()
        self._update_gauges()
        return Flushed(count, self.stats.blocks_live)

    # -- the shard's side ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._opening is not None

    @property
    def needs_new_stream(self) -> bool:
        """Handles are used up: a new stream counts from 1 again."""
        return not self.rows.has_handles and not self.rows

    def stream_opened(self, opening: Opening, kv_epoch: int) -> None:
        """A stream without rows. Tree and allocator stay only if the KV cache is still the same (rule 7)."""
        if self.rows:
            self.stream_lost()
        allocator = self.allocator
        shape = (opening.num_blocks, opening.block_size, opening.num_host_blocks)
        self._count_stream(kv_epoch)
        self._judge(has_died=kv_epoch != self._last_epoch)
        if kv_epoch != self._kv_epoch or shape != _shape(allocator):
            self._renew_allocator(*shape)
        self._kv_epoch = self._last_epoch = kv_epoch
        self._opening = opening
        speculated = self._config.speculate
        self._rules = GrowthRules(opening.block_size, window_tokens(opening.window, speculated), speculated)
        self._leaders = PrefixLeaders(opening.block_size)
        self._seen = self._said = 0
        self._left_at = None
        self._may_admit = True
        if self.rows.next_handle > LAST_HANDLE // 2:
            self.rows.next_handle = 1
        for entry in [entry for entry in self.queue if not self._fits_alone(entry)]:
            self._fail(entry, GenerationFailed("the model server came back with less memory than this needs"), False)
        self._update_gauges()

    def stream_lost(self, keep_memory: bool = True) -> None:
        """All rows are gone. Who ran returns to the head of the queue and goes on from its ids; nothing is sent twice.

        Without `keep_memory` the next stream starts with an empty tree, whatever its epoch.
        """
        if self.rows:
            self.stats.inference_count["decode"] += 1
            self.stats.inference_failure["decode"] += 1
        if not keep_memory:
            self._kv_epoch = None
        lost = list(self.rows)
        self._lost += [(entry, entry.decoding) for entry in lost]
        if self._opening is not None and self._left_at is not None:
            self._others_ran |= self._seen - self._left_at <= self._opening.window
        for entry in lost:
            entry.barren_losses += 1
            self._requeue(entry, tell_shard=False, keep_memory=keep_memory)
        if keep_memory:
            self._moves.stream_lost(self.allocator)
        else:
            self._renew_allocator(*_shape(self.allocator))
        self._opening = None
        self._is_mid_step = False
        # What was decided and not yet said names handles and blocks of the stream that is gone.
        self._cancel, self._grow, self._admit = [], [], []
        self._update_gauges()
        for entry in lost:  # when all are back in the queue: who fails takes its siblings along
            if entry.barren_losses > MAX_BARREN_LOSSES:
                self._fail(entry, _deadly(), False)

    def handle_step(self, step: Step) -> None:
        for _ in self.step_work(step):
            pass

    def step_work(self, step: Step) -> Iterator[None]:
        """handle_step in slices: run the iterator to its end before the next Step; others may run in between."""
        if step.opening is not None:
            self.stream_opened(step.opening, step.kv_epoch)
            return
        opening = self._opening
        if opening is None:
            return  # a step of a stream that was given up
        self._is_mid_step = True
        began = self._clock()
        num_leaders = len(self._leaders)
        yield from self._steps.work(step, self.allocator, self._leaders, self._short)
        self._is_mid_step = False
        self._seen = step.number
        self._moves.confirm(step.number, opening.window)
        if step.kv_epoch != self._kv_epoch:
            self._change_epoch(step.kv_epoch)
        if step.progress_handles or len(self._leaders) != num_leaders:
            self._may_admit = True  # somebody may have waited for these prefixes
        self._count(step, self._clock() - began)
        self._update_gauges()

    def next_command(self) -> Command | None:
        """Decide, and say it; None when there is nothing to say. What is returned must be sent."""
        opening = self._opening
        if opening is None or self._is_mid_step:
            return None
        if self._short:
            self._grant()
        if self._may_admit and self.queue:
            self._start_waiting(opening)
        moves = self.allocator.take_moves()
        said = BlockMoves(moves.to_host, moves.sources, moves.targets)
        command = Command(self._seen, self._cancel, self._grow, self._admit, said)
        if not command and self._seen - self._said < max(1, opening.window // 2):
            return None
        self._said = self._seen
        self._moves.say(self._seen, moves)
        self._cancel, self._grow, self._admit = [], [], []
        self._update_gauges()
        return command

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        short, self._short = self._short, {}
        for entry in grant(short.values(), self.rows, self.allocator, self._rules, self._give, self._preempt):
            self._short[entry.handle] = entry

    def _give(self, entry: Entry, num_blocks: int) -> None:
        assert entry.allocation is not None
        blocks = self.allocator.grow(entry.allocation, num_blocks)
        assert blocks is not None, "granted what is not available"
        self._grow.append((entry.handle, blocks))
        self.rows.set_room(entry, self._rules.block_size, self._rules.window)

    def _preempt(self, entry: Entry) -> None:
        self._requeue(entry, tell_shard=True)
        self.stats.preemptions += 1

    def _start_waiting(self, opening: Opening) -> None:
        reason = "chunking"
        if not self._config.supports_chunking and self.rows:
            opens = self._gate.opens(min(len(self.queue), opening.max_rows - len(self.rows)), len(self.rows))
            if opens is None:
                return  # asked again after the next Step
            reason = opens
        had_rows, began = bool(self.rows), self._clock()
        self._may_admit = False  # who is left is tried again when something has changed for them
        is_cut = admit_waiting(
            self.queue,
            self.rows,
            self._leaders,
            self.allocator,
            opening.max_rows,
            self._rules.window,
            self._start,
            None if self._config.supports_chunking else self._config.max_batch_prefill_tokens,
            self._is_held,
        )
        if is_cut:
            self._may_admit = True
        if self._admit:
            self._gate.admitted()
            self.stats.observe("tgi_batch_next_size", len(self._admit), None)
            if had_rows:
                self.stats.concat[reason] += 1
                self.stats.observe("tgi_batch_concat_duration", self._clock() - began, "decode")

    def _start(self, entry: Entry) -> None:
        assert entry.allocation is not None
        if entry.admitted_at is None:
            entry.admitted_at = self._clock()
            entry.cached_len = self._cached_before(entry)
            self.stats.prompt_tokens += entry.num_prompt
            self.stats.cached_tokens += entry.allocation.cached_len
        self._admit.append(entry.admit_message(self._eos_ids))

    def _cached_before(self, entry: Entry) -> int:
        """Tokens of its prompt that were cached before its request came: those that the first of siblings found."""
        assert entry.allocation is not None
        found, siblings = entry.allocation.cached_len, entry.request.siblings
        return found if siblings is None else self._found_by_first.setdefault(siblings, found)

    # -- who kills the shard -------------------------------------------------------------------------------------------

    def _judge(self, has_died: bool) -> None:
        """A stream follows one that was lost: who did it? A cut is nobody's fault, unless it comes again and again."""
        lost, self._lost = self._lost, []
        others_ran, self._others_ran = self._others_ran, False
        ran: dict[Siblings | Entry, bool] = {}
        for entry, has_yielded in lost:
            if entry.state is not State.ENDED:
                ran[entry.suspect] = ran.get(entry.suspect, False) or has_yielded
                has_died |= entry.barren_losses >= MAX_BARREN_CUTS
        if not has_died or not ran:
            return
        culprit = self._suspects.died(ran, others_ran)
        for entry in [entry for entry in self.queue if entry.suspect is culprit]:
            self.stats.suspects_failed += entry.state is not State.ENDED
            self._fail(entry, _deadly(), False)

    def _is_held(self, entry: Entry) -> bool:
        return bool(self._suspects) and self._suspects.holds(entry.suspect)

    def _clear(self, entry: Entry) -> None:
        """Its row has yielded a token."""
        if self._suspects and self._suspects.clear(entry.suspect):
            self.stats.suspects_cleared += 1
            self._may_admit = True

    def _acquit(self, entry: Entry) -> None:
        """It ends. (One of siblings that ends without a token takes the others along, and with one it was cleared.)"""
        if self._suspects:
            self._suspects.remove(entry.suspect)
            self._may_admit = True

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _leave(self, entry: Entry, tell_shard: bool, publish: bool = True) -> None:
        """A row ends, whatever the shard still computes for it; the caller queues its entry again or ends it.

        Its computed and kept positions enter the prefix tree and its blocks are free: both may be given away in the
        same Command (rule 1).
        """
        allocation = self._drop_row(entry, tell_shard)
        if publish and entry.request.use_cache and self.allocator.shares:
            self.allocator.free(allocation, entry.ids, entry.num_computed)
        else:
            self.allocator.free(allocation)

    def _finish(self, entry: Entry, tell_shard: bool) -> None:
        self._leave(entry, tell_shard)
        self._acquit(entry)

    def _drop_row(self, entry: Entry, tell_shard: bool) -> Allocation:
        self._leaders.remove(entry)
        handle, allocation = self.rows.remove(entry)
        self._short.pop(handle, None)
        if tell_shard:
            self._cancel.append(handle)
            self._left_at = self._seen
        self._may_admit = True
        return allocation

    def _requeue(self, entry: Entry, tell_shard: bool, keep_memory: bool = True) -> None:
        if keep_memory:
            self._leave(entry, tell_shard)
        else:
            self._drop_row(entry, tell_shard)
        entry.state = State.QUEUED
        self.queue.put_back(entry)

    def _withdraw(self, entry: Entry, tell_shard: bool, publish: bool = True) -> None:
        if entry.state is State.LIVE:
            self._leave(entry, tell_shard, publish)
        else:
            self.queue.remove(entry)
            self._may_admit = True
        entry.state = State.ENDED
        self._acquit(entry)
        self._update_gauges()

    def _fail(self, entry: Entry, error: TgiError, tell_shard: bool) -> None:
        if entry.state is State.ENDED:
            return  # a sibling failed just before, and took it along
        self._withdraw(entry, tell_shard, publish=False)  # what made it fail may be in its KV
        try:
            entry.sink.fail(error)
        except Exception:
            logger.exception("a request's end could not be handed on")

    def _change_epoch(self, kv_epoch: int) -> None:
        """The cache was replaced under the stream: nothing of it holds any more, every row starts over from its ids."""
        for entry in list(self.rows):
            self._requeue(entry, tell_shard=True)
        self._renew_allocator(*_shape(self.allocator))
        self._kv_epoch = self._last_epoch = kv_epoch

    def _renew_allocator(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        assert not self.rows, "a row would keep blocks of a pool that is gone"
        self._blocks_before = self._blocks_ever()
        self._moves.clear()
        self.allocator = _make_allocator(self._config.prefix_caching, num_blocks, block_size, num_host_blocks)

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _count_stream(self, kv_epoch: int) -> None:
        if self._last_epoch is not None:
            self.stats.reconnects += 1
            self.stats.restarts += kv_epoch != self._last_epoch

    @property
    def _pool_tokens(self) -> int:
        return (self.allocator.num_blocks - 1) * self.allocator.block_size

    def _fits_alone(self, entry: Entry) -> bool:
        fits_pool = blocks_for(entry.limit, self.allocator.block_size) < self.allocator.num_blocks
        return fits_pool and entry.limit <= self._max_tokens

    def _count(self, step: Step, handling_s: float) -> None:
        timings = step.timings
        steps = timings.steps or 1
        if not timings.prefill_tokens:
            self._gate.count_steps(steps)
        if not step.handles and not step.progress_handles:
            return
        stats = self.stats
        method: Method = "prefill" if timings.prefill_tokens else "decode"
        stats.inference_count[method] += steps
        stats.inference_success[method] += steps
        stats.rows_waiting = step.rows_waiting
        forward_s, collect_s = timings.forward_ns / steps / 1e9, timings.collect_ns / steps / 1e9
        whole_s = timings.plan_ns / steps / 1e9 + forward_s + collect_s + handling_s
        stats.observe("tgi_batch_inference_duration", whole_s, method)
        stats.observe("tgi_batch_forward_duration", forward_s, method)
        stats.observe("tgi_batch_decode_duration", collect_s, method)
        stats.observe("tgi_batch_filter_duration", handling_s, method)
        self._count_skipped(step, steps)

    def _count_skipped(self, step: Step, steps: int) -> None:
        observe = self.stats.observe
        if not self._config.speculate or not step.num_tokens:
            observe("tgi_request_skipped_tokens", 0, None, len(step.token_ids))  # each came from a step of its own
        elif steps == 1:  # merged steps do not tell what each of them gave a row
            for count, num_rows in Counter(step.num_tokens).items():
                if count:
                    observe("tgi_request_skipped_tokens", count - 1, None, num_rows)

    def _update_gauges(self) -> None:
        stats, allocator = self.stats, self.allocator
        stats.queue_size = len(self.queue)
        stats.batch_current_size = len(self.rows)
        stats.batch_current_max_tokens = self.rows.room
        stats.blocks_free = allocator.num_free
        stats.blocks_cached = allocator.num_available - allocator.num_free
        stats.blocks_live = allocator.num_blocks - 1 - allocator.num_available
        stats.blocks_host = allocator.num_host_used
        ever = self._blocks_ever()
        stats.evicted_blocks = ever["evicted"]
        stats.offloaded_blocks = ever["offloaded"]
        stats.returned_blocks = ever["returned"]

    def _blocks_ever(self) -> Counter[str]:
        allocator, before = self.allocator, self._blocks_before
        return Counter(
            evicted=before["evicted"] + allocator.num_evicted,
            offloaded=before["offloaded"] + allocator.num_offloaded,
            returned=before["returned"] + allocator.num_returned,
        )


def _deadly() -> GenerationFailed:
    return GenerationFailed("the model server died repeatedly while it ran this")


def _make_allocator(prefix_caching: bool, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> Allocator:
    if not prefix_caching:
        return SimpleAllocator(num_blocks, block_size)
    return RadixAllocator(num_blocks, block_size, num_host_blocks)


def _shape(allocator: Allocator) -> tuple[int, int, int]:
    return allocator.num_blocks, allocator.block_size, allocator.num_host_blocks
