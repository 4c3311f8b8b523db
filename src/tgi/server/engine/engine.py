"""Engine: commands in, steps out. Owns the rows and decides what each step computes; the device computes it.

Rows with a grammar share the steps of all others, but what such a row may choose is known only once the id before it
has been collected. A step with one therefore starts in two parts: its forward is launched, the step before it is
collected, then its choices are made. A row whose mask is late sits the step out (rule 3): its last position counts as
not computed and is computed again in a later step; a prompt's other positions stay.

Not thread-safe: one thread owns it (engine/loop.py). Knows no gRPC and no text.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tgi.enums import EndReason
from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.batch.table import RequestTable
from tgi.server.engine.device import Chosen, Constraint, Device
from tgi.server.engine.out_of_memory import Squeeze, is_out_of_memory, release_memory, split
from tgi.server.engine.plan import PrefillBudget, Prompt, prompt_order, share_budget
from tgi.server.engine.prompt_scores import plan_scoring, read_scores
from tgi.server.engine.row_spans import RowSpans
from tgi.server.grammar.mask import Masks
from tgi.server.sampling.logprobs import keep_top
from tgi.shard_client.messages import Admit, BlockMoves, Command, Opening, RowError, Step, Timings, TopTokens

log = logging.getLogger(__name__)

SCRATCH_BLOCK = b"\0\0\0\0"  # block 0 alone: a liveness request runs there, beside whatever the pool holds


@dataclass(slots=True)
class Part:
    """A launched piece of a step: the whole of it, unless a fault made us split it."""

    plan: StepPlan
    launched: object
    takes: npt.NDArray[np.bool_] | None = None  # of the rows with `samples`: False where one sits out; None: none does


@dataclass(slots=True)
class InFlight:
    plan: StepPlan
    parts: list[Part]
    errors: list[RowError]
    plan_ns: int
    has_chosen: bool = True  # False: launched up to its choices


OOM_RETRIES = 2  # of a single token, with nothing left to make smaller

# While a step's choices wait for masks.
MASK_POLL_S = 0.0005
MASK_GRACE_S = 0.002  # behind the end of the forward
MASK_LIMIT_S = 0.01  # in all, whatever the forward takes: the step before it waits to be sent


@dataclass(slots=True)
class Limits:
    """What the engine works with, fixed at warm-up."""

    window: int
    budget: PrefillBudget
    num_blocks: int
    kv_epoch: int
    num_host_blocks: int = 0
    world_size: int = 1
    decode_s: float = 0.0  # of the fastest step
    token_s: float = 0.0  # of one prompt token


@dataclass(slots=True)
class Pending:
    """Row changes that wait for the next step, and errors that wait for the next Step."""

    changes: RowChanges = field(default_factory=lambda: RowChanges([], [], []))
    errors: list[RowError] = field(default_factory=list)


class Engine:
    def __init__(
        self,
        device: Device,
        table: RequestTable,
        limits: Limits,
        masks: Masks | None = None,
        spans: RowSpans | None = None,
        tell_finished: Callable[[int], None] | None = None,
    ) -> None:
        """`masks`: None where no request may have a grammar. `spans`: None where nobody traces. `tell_finished` hears
        of `finished` at once."""
        self._tell_finished = tell_finished
        self.table = table
        self.limits = limits
        self._device = device
        self._masks = masks
        self._spans = spans
        self._constrained: set[int] = set()  # rows with a grammar
        self._held: set[int] = set()  # of them those that sat out, until their masks are there
        self._top_n = [0] * (table.max_rows + 1)
        self._in_flight: deque[InFlight] = deque()
        self._pending = Pending()
        self._squeeze = Squeeze()
        self._yielded = [False] * (table.max_rows + 1)  # by row: has it chosen an id here
        self._owner: str | None = None  # of the blocks
        self._number = 0  # of the last step launched or reported
        self._seen = 0
        self.finished = 0  # rows that chose an id and ended without a fault; one writer, any reader

    # --- the stream --------------------------------------------------------

    def open(self, owner: str | None = None) -> Step:
        """A new stream: no rows, steps count from 0. What is still in flight will be dropped by the snapshot.

        `owner`: who will say which blocks hold what. Another than the last one gets a new epoch: what the last one
        believes of the cache will not hold any more when it comes back (rule 7). None: nobody, rows are only dropped.
        """
        if owner is not None and owner != self._owner:
            self._owner = owner
            self.limits.kv_epoch = secrets.randbits(64)
        self._yielded = [False] * len(self._yielded)  # rows that are dropped have not finished
        for handle in self.table.handles():
            self._remove(handle)
        while self._in_flight:
            self.collect()
        self._pending.errors.clear()
        self._number = self._seen = 0
        return Step(
            number=0,
            kv_epoch=self.limits.kv_epoch,
            free_rows=self.table.num_free,
            opening=Opening(
                window=self.limits.window,
                max_rows=self.table.max_rows,
                num_blocks=self.limits.num_blocks,
                block_size=self.table.block_size,
                num_host_blocks=self.limits.num_host_blocks,
            ),
        )

    def disown(self) -> None:
        """Rows are stepped by hand: what a router left in the cache is overwritten."""
        self._owner = None

    def apply(self, command: Command) -> None:
        """Moves, then cancel, grow and admit; all of it before the next step (rule 1). Unknown handles are ignored
        (rule 4). Raises ValueError, with nothing changed, where a block that is to be moved does not exist."""
        if command.moves:
            self._move(command.moves)
        self._seen = max(self._seen, command.seen)
        for handle in command.cancel:
            self._remove(handle)
        for handle, blocks in command.grow:
            self._grow(handle, blocks)
        for admit in command.admit:
            self._admit(admit)

    def _move(self, moves: BlockMoves) -> None:
        on_host = np.frombuffer(moves.to_host, np.uint8) > 0
        sources, targets = np.frombuffer(moves.sources, np.uint32), np.frombuffer(moves.targets, np.uint32)
        cached, hosted = np.where(on_host, sources, targets), np.where(on_host, targets, sources)
        limits = self.limits
        if cached.max() >= limits.num_blocks or cached.min() == 0 or hosted.max(initial=0) >= limits.num_host_blocks:
            raise ValueError("a block is to be moved that the cache or the host does not have")
        self._pending.changes.moves += moves

    def _grow(self, handle: int, blocks: bytes) -> None:
        row = self.table.row_of(handle)
        if row is None:
            return
        before = int(self.table.num_blocks[row])
        try:
            numbers = self._checked_blocks(blocks, before)
        except ValueError as error:
            self._fail(RowError(handle, "invalid", str(error)))
            return
        self.table.grow(handle, len(numbers))
        self._pending.changes.blocks.append((row, before, numbers))

    def _checked_blocks(self, packed: bytes, before: int) -> npt.NDArray[np.int32]:
        """The numbers, for a row that has `before` blocks. Raises ValueError where they cannot be its own."""
        numbers = np.frombuffer(packed, np.uint32)
        if before + len(numbers) > self._device.max_blocks:
            raise ValueError(f"{before + len(numbers)} blocks; a request can have {self._device.max_blocks}")
        if packed == SCRATCH_BLOCK:
            return numbers.astype(np.int32)
        if len(numbers) and (int(numbers.max()) >= self.limits.num_blocks or int(numbers.min()) == 0):
            raise ValueError(f"a block number is outside 1…{self.limits.num_blocks - 1}")
        return numbers.astype(np.int32)

    def _admit(self, admit: Admit) -> None:
        # The router has checked all of this; what still is wrong is one request's error, never the stream's.
        try:
            reason = self._device.check(admit)
            if reason is None and admit.grammar is not None and self._masks is None:
                reason = "grammars are not supported by this model server"
            if reason is not None:
                raise ValueError(reason)
            blocks = self._checked_blocks(admit.blocks, 0)
            row = self.table.add(admit)
        except (ValueError, LookupError) as error:
            log.error("request refused by the engine: %s", error)
            self._pending.errors.append(RowError(admit.handle, "invalid", str(error)))
            return
        self._top_n[row] = admit.top_n
        if admit.grammar is not None and self._masks is not None:
            self._constrained.add(row)
            self._masks.add(row, admit)
        if self._spans is not None:
            self._spans.add(row, admit)
        self._pending.changes.added.append((row, admit))
        self._pending.changes.blocks.append((row, 0, blocks))

    def _fail(self, error: RowError) -> None:
        """End the row; the next Step says why."""
        self._remove(error.handle, error.code, error.message)
        self._pending.errors.append(error)

    def _remove(self, handle: int, reason: str = "cancelled", error: str | None = None) -> None:
        """`reason` and `error` are for the row's span."""
        row = self.table.remove(handle)
        if row is None:
            return
        if error is None and self._yielded[row]:
            self.finished += 1
            if self._tell_finished is not None:
                self._tell_finished(self.finished)
        self._yielded[row] = False
        if self._spans is not None:
            self._spans.end(row, self.table.num_generated(row), reason, error)
        if self._masks is not None and row in self._constrained:
            self._constrained.remove(row)
            self._held.discard(row)
            self._masks.remove(row)
        changes = self._pending.changes
        # A row that the device never saw leaves no trace; one added and removed would confuse those who keep rows.
        added = len(changes.added)
        changes.added = [entry for entry in changes.added if entry[0] != row]
        changes.blocks = [entry for entry in changes.blocks if entry[0] != row]
        if len(changes.added) == added:
            changes.removed.append(row)

    # --- one step ----------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def depth(self) -> int:
        """Steps that may be in flight before one must be collected."""
        return self._device.depth

    @property
    def has_rows(self) -> bool:
        return self.table.num_live > 0

    @property
    def step_number(self) -> int:
        return self._number

    def estimate_s(self, num_tokens: int) -> float:
        """How long a step of so many tokens should take, from what warm-up measured."""
        return self.limits.decode_s + num_tokens * self.limits.token_s

    @property
    def window_is_open(self) -> bool:
        """May a further step be launched before the router has answered (rule 6)?"""
        return self._number < self._seen + self.limits.window

    def plan(
        self, handles: Sequence[int] | None = None, chunk_lens: Mapping[int, int] | None = None
    ) -> StepPlan | None:
        """What the next step computes, or None when no row can run.

        `handles` and `chunk_lens` (handle -> tokens) are for stepping by hand (generate.v3): exactly these rows, whole
        prompts or the given chunk.
        """
        self._tend_grammars()
        table = self.table
        remaining = table.num_ids - table.computed
        room = table.num_blocks * table.block_size - table.computed
        able = table.live & (table.num_ids < table.max_len) & (room > 0)
        if self._held:
            able[list(self._held)] = False
        if handles is not None:
            return self._plan_by_hand(handles, chunk_lens or {}, able, remaining, room)
        decode = np.flatnonzero(able & (remaining == 1))
        waiting = np.flatnonzero(able & (remaining > 1))
        budget = self.limits.budget
        shares: list[tuple[int, int]] = []
        if len(waiting):
            order = waiting[prompt_order(table.priority[waiting], table.order[waiting])]
            prompts = [Prompt(int(row), int(remaining[row]), int(room[row])) for row in order]
            left = self._squeeze.limit(budget.tokens(len(decode)))
            shares = share_budget(prompts, left, budget.chunked, budget.padded)
        if not len(decode) and not shares:
            return None
        rows = np.concatenate([decode, np.array([row for row, _ in shares], np.int64)]).astype(np.int64)
        lens = np.concatenate([np.ones(len(decode), np.int64), np.array([share for _, share in shares], np.int64)])
        return self._compose(rows, lens.astype(np.int64))

    def _plan_by_hand(
        self,
        handles: Sequence[int],
        chunk_lens: Mapping[int, int],
        able: npt.NDArray[np.bool_],
        remaining: npt.NDArray[np.int64],
        room: npt.NDArray[np.int64],
    ) -> StepPlan | None:
        rows: list[int] = []
        lens: list[int] = []
        for handle in handles:
            row = self.table.row_of(handle)
            if row is not None and able[row]:
                rows.append(row)
                lens.append(int(min(remaining[row], room[row], chunk_lens.get(handle, remaining[row]))))
        return self._compose(np.array(rows, np.int64), np.array(lens, np.int64)) if rows else None

    def _compose(self, rows: npt.NDArray[np.int64], lens: npt.NDArray[np.int64]) -> StepPlan:
        table = self.table
        starts = table.computed[rows]
        from_device = starts >= table.num_given[rows]
        ids = np.zeros(int(lens.sum()), np.int64)
        position = 0
        for row, start, length, known in zip(rows.tolist(), starts.tolist(), lens.tolist(), (~from_device).tolist()):
            if known:
                ids[position : position + length] = table.given[row][start : start + length]
            position += length
        return StepPlan(
            number=self._number + 1,
            handles=table.handle[rows],
            rows=rows,
            starts=starts,
            query_lens=lens,
            samples=starts + lens == table.num_ids[rows],
            from_device=from_device,
            ids=ids,
            scoring=plan_scoring(table, rows, starts, lens),
        )

    def launch(self, plan: StepPlan, plan_ns: int = 0) -> None:
        """Start the step. An exception of one request's making is found by halves and becomes that request's error.

        Where the step has choices to make under a grammar and another is in flight, they wait for `collect`.
        """
        assert not self._in_flight or self._in_flight[-1].has_chosen
        changes, self._pending.changes = self._pending.changes, RowChanges([], [], [])
        if changes:
            self._device.apply(changes)
        self._number = plan.number
        is_constrained = bool(self._constrained) and not self._constrained.isdisjoint(plan.rows[plan.samples].tolist())
        errors: list[RowError] = []
        start = self._device.forward if is_constrained else self._device.launch
        parts = self._by_halves(plan, errors, lambda plan: Part(plan, start(plan)))
        flight = InFlight(plan, parts, errors, plan_ns, has_chosen=not is_constrained)
        self._in_flight.append(flight)
        if flight.has_chosen:
            self._count(flight)
        elif len(self._in_flight) == 1:
            self._choose(flight)

    def _by_halves(
        self, plan: StepPlan, errors: list[RowError], start: Callable[[StepPlan], Part], retries: int = OOM_RETRIES
    ) -> list[Part]:
        try:
            return [start(plan)]
        except Exception as error:
            if self.limits.world_size > 1:
                raise  # the other ranks have the plan already: the group restarts
            is_memory = is_out_of_memory(error)
            if is_memory and retries and plan.num_tokens == 1:
                halves: tuple[StepPlan, ...] = (plan,)
            else:
                halves = self._halves_after(plan, error, errors)
        # Behind the handler: the exception and the tensors of its frames are gone before the halves need memory.
        parts: list[Part] = []
        for half in halves:
            if any(fault.handle in half.handles for fault in errors):
                continue  # the first tokens of a lone row's chunk have failed: there is nothing to go on from
            if is_memory:
                release_memory()
            parts += self._by_halves(half, errors, start, retries - 1 if half is plan else OOM_RETRIES)
        return parts

    def _halves_after(self, plan: StepPlan, error: Exception, errors: list[RowError]) -> tuple[StepPlan, ...]:
        """What to launch instead of what failed. A lone row that cannot be made smaller ends with an error."""
        if is_out_of_memory(error):
            self._squeeze.note(plan, error)
            halves = split(plan)
            code, message = "out_of_memory", f"the model server has run out of memory: {error}"
        else:
            log.exception("step %d with %d rows failed to launch", plan.number, plan.num_rows)
            halves = split(plan) if plan.num_rows > 1 else None
            code, message = "generation", f"{type(error).__name__}: {error}"
        if halves is None:
            errors.append(RowError(int(plan.handles[0]), code, message))
            return ()
        return halves

    def _count(self, flight: InFlight) -> None:
        """Rows are one step further; those that sat out but for their last position."""
        for part in flight.parts:
            rows = part.plan.rows
            self.table.computed[rows] += part.plan.query_lens
            self.table.num_ids[rows] += part.plan.samples
            if part.takes is not None:
                absent = rows[part.plan.samples][~part.takes]
                self.table.computed[absent] -= 1
                self.table.num_ids[absent] -= 1
        for error in flight.errors:
            self._remove(error.handle, error.code, error.message)

    # --- choices under a grammar -------------------------------------------

    def _choose(self, flight: InFlight) -> None:
        """Launch the rest of a step whose rows' last ids are all collected."""
        assert self._masks is not None
        choosing = [row for part in flight.parts for row in part.plan.rows[self._under_grammar(part.plan)].tolist()]
        self._await_masks(flight, choosing)
        masks = {row: mask for row in choosing if (mask := self._masks.mask(row)) is not None}
        begun = {id(part.plan): part.launched for part in flight.parts}

        def choose(plan: StepPlan) -> Part:
            # What fails is done again by halves, from its forward on.
            launched = begun.pop(id(plan)) if id(plan) in begun else self._device.forward(plan)
            constraint = self._constraint(plan, masks)
            self._device.choose(launched, constraint)
            return Part(plan, launched, None if constraint is None or constraint.takes.all() else constraint.takes)

        flight.parts = [done for part in flight.parts for done in self._by_halves(part.plan, flight.errors, choose)]
        flight.has_chosen = True
        self._count(flight)
        for row in choosing:
            if row not in masks and row in self._constrained:
                self._held.add(row)
                self._masks.call_when_settled(row)

    def _under_grammar(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        """Which rows of the plan choose under a grammar and have not ended since it was made."""
        is_alive = self.table.handle[plan.rows] == plan.handles
        is_constrained = np.array([row in self._constrained for row in plan.rows.tolist()], np.bool_)
        return plan.samples & is_alive & is_constrained

    def _await_masks(self, flight: InFlight, rows: list[int]) -> None:
        """Until the masks are there, or the forward is done and a little more time has passed. For rows whose masks are
        known to be slow no time is added."""
        assert self._masks is not None
        give_up = time.monotonic() + MASK_LIMIT_S
        while not self._masks.wait(rows, MASK_POLL_S) and time.monotonic() < give_up:
            if all(self._device.has_forwarded(part.launched) for part in flight.parts):
                self._masks.wait([row for row in rows if not self._masks.is_slow(row)], MASK_GRACE_S)
                return

    def _constraint(self, plan: StepPlan, masks: Mapping[int, npt.NDArray[np.int32]]) -> Constraint | None:
        under_grammar = self._under_grammar(plan)[plan.samples]
        if not under_grammar.any():
            return None
        rows = plan.rows[plan.samples]
        takes = np.array([not under or row in masks for row, under in zip(rows.tolist(), under_grammar)], np.bool_)
        masked = np.flatnonzero(under_grammar[takes])
        used = [masks[row] for row in rows[takes][masked].tolist()]
        return Constraint(takes, masked, np.stack(used) if used else np.empty((0, 0), np.int32))

    def _tend_grammars(self) -> None:
        """End rows whose grammars failed; let those go on whose masks have come."""
        if self._masks is None or not self._constrained:
            return
        for row, message in self._masks.faults():
            handle = int(self.table.handle[row])
            log.error("request refused by its grammar: %s", message)
            self._fail(RowError(handle, "grammar", message))
        self._held = {row for row in self._held if self._masks.mask(row) is None}

    def rows_under_grammar(self, handles: Sequence[int]) -> list[int]:
        """Their rows, of the handles that have one and a grammar."""
        rows = (self.table.row_of(handle) for handle in handles)
        return [row for row in rows if row in self._constrained]

    @property
    def num_held(self) -> int:
        """Rows that do not run because their grammars' masks are late."""
        return len(self._held)

    @property
    def patience_s(self) -> float:
        """Seconds until a grammar will have taken too long."""
        return math.inf if self._masks is None else self._masks.next_due_s

    @property
    def has_errors(self) -> bool:
        """Do errors wait for the next Step?"""
        return bool(self._pending.errors)

    def collect(self) -> Step:
        """Wait for the oldest step in flight and read it by its own snapshot (rule 2). Then the choices of the next can
        be made, if it has any left."""
        flight = self._in_flight.popleft()
        assert flight.has_chosen
        started = time.perf_counter_ns()
        step = self._empty_step(flight.plan.number)
        ends = bytearray()
        advanced: list[tuple[int, int]] = []
        forward_ns = 0
        for part in flight.parts:
            chosen = self._device.collect(part.launched)
            forward_ns += chosen.forward_ns
            if part.plan.scoring is not None:
                step.prompt_logprobs += read_scores(part.plan, part.plan.scoring, chosen.prompt_scores, self.table)
            self._read(part, chosen, step, ends, advanced)
            self._report_progress(part, step)
        if advanced and self._masks is not None:
            self._masks.advance(advanced)
        if self._in_flight and not self._in_flight[0].has_chosen:
            self._choose(self._in_flight[0])
        step.ends = bytes(ends) if any(ends) else b""
        step.errors = [*self._pending.errors, *flight.errors]
        self._pending.errors = []
        step.rows_running = flight.plan.num_rows
        step.rows_waiting = self._rows_waiting()
        step.free_rows = self.table.num_free
        prefill = int(flight.plan.query_lens[~flight.plan.from_device].sum())
        step.timings = Timings(
            plan_ns=flight.plan_ns,
            forward_ns=forward_ns,
            collect_ns=time.perf_counter_ns() - started,
            steps=1,
            prefill_tokens=prefill,
            decode_tokens=flight.plan.num_tokens - prefill,
        )
        return step

    def _read(self, part: Part, chosen: Chosen, step: Step, ends: bytearray, advanced: list[tuple[int, int]]) -> None:
        table = self.table
        handles, rows = part.plan.handles[part.plan.samples], part.plan.rows[part.plan.samples]
        if part.takes is not None:
            handles, rows = handles[part.takes], rows[part.takes]
        # Plain numbers: a look into a numpy column for each row would take longer than all the rest.
        columns = zip(
            handles.tolist(), rows.tolist(), chosen.ids.tolist(), chosen.logprobs.tolist(), chosen.is_nan.tolist()
        )
        for index, (handle, row, token, logprob, is_nan) in enumerate(columns):
            if table.row_of(handle) != row:
                continue  # it ended meanwhile: this result is one too many
            table.num_left[row] -= 1
            self._yielded[row] = True
            end = EndReason.RUNNING
            if is_nan:
                end = EndReason.NAN
            elif row in self._constrained and self._masks is not None and self._masks.is_end(row, token):
                end = EndReason.EOS
            elif token in table.end_ids[row]:
                end = self._end_of(row, token)
            elif not table.num_left[row]:
                end = EndReason.LENGTH
            step.handles.append(handle)
            step.token_ids.append(token)
            step.logprobs.append(logprob)
            ends.append(end)
            if (top_n := self._top_n[row]) and chosen.top_ids is not None and chosen.top_logprobs is not None:
                logprobs = chosen.top_logprobs[index].tolist()
                count = keep_top(logprobs, top_n)
                ids = array("I", chosen.top_ids[index, :count].tolist())
                step.top_tokens.append(TopTokens(handle, 0, ids, array("f", logprobs[:count])))
            if end is not EndReason.RUNNING:
                self._remove(handle, end.name.lower(), "the logits are not numbers" if is_nan else None)
            elif row in self._constrained:
                advanced.append((row, token))

    def _end_of(self, row: int, token: int) -> EndReason:
        """EOS wins over length on the last token; an id that is both EOS and stop id is EOS."""
        stopping = self.table.stopping[row]
        assert stopping is not None
        return EndReason.EOS if token in stopping.eos_ids and not stopping.ignore_eos else EndReason.STOP_ID

    def _report_progress(self, part: Part, step: Step) -> None:
        """Of rows that have not chosen. A prompt whose row sat out is read but for its last position."""
        plan = part.plan
        if part.takes is None and plan.samples.all():
            return
        reading, computed = ~plan.samples, plan.starts + plan.query_lens
        if part.takes is not None:
            absent = np.flatnonzero(plan.samples)[~part.takes]
            computed[absent] -= 1
            reading[absent] = plan.query_lens[absent] > 1
        for handle, row, length in zip(
            plan.handles[reading].tolist(), plan.rows[reading].tolist(), computed[reading].tolist()
        ):
            if int(self.table.handle[row]) == handle:
                step.progress_handles.append(handle)
                step.computed_len.append(length)

    def _rows_waiting(self) -> int:
        """Rows without room for what they would compute next: a token, or a whole prompt where it is not chunked."""
        table = self.table
        room = table.num_blocks * table.block_size - table.computed
        least = 1 if self.limits.budget.chunked else np.maximum(table.num_ids - table.computed, 1)
        return int(np.count_nonzero(table.live & (table.num_ids < table.max_len) & (room < least)))

    def _empty_step(self, number: int) -> Step:
        return Step(number=number, kv_epoch=self.limits.kv_epoch)

    def idle_step(self) -> Step | None:
        """When rows exist and none can run, or errors wait: a Step without results that says so."""
        if not self.has_rows and not self._pending.errors:
            return None
        self._number += 1
        step = self._empty_step(self._number)
        step.errors, self._pending.errors = self._pending.errors, []
        step.rows_waiting = self._rows_waiting()
        step.free_rows = self.table.num_free
        step.timings = Timings(steps=1)
        return step

    def step(self, handles: Sequence[int] | None = None, chunk_lens: Mapping[int, int] | None = None) -> Step | None:
        """Plan, launch and collect at once, for stepping by hand."""
        started = time.perf_counter_ns()
        plan = self.plan(handles, chunk_lens)
        if plan is None:
            return self.idle_step() if self._pending.errors else None
        self.launch(plan, time.perf_counter_ns() - started)
        return self.collect()

    def idle(self) -> None:
        self._device.idle()
