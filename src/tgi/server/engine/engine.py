"""Engine: commands in, steps out. Owns the rows and decides what each step computes; the device computes it.

Not thread-safe: one thread owns it (engine/loop.py). Knows no gRPC and no text.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tgi.enums import EndReason
from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.batch.table import RequestTable
from tgi.server.engine.device import Chosen, Device
from tgi.server.engine.plan import PrefillBudget, Prompt, share_budget
from tgi.server.sampling.logprobs import keep_top
from tgi.shard_client.messages import Admit, Command, Opening, RowError, Step, Timings, TopTokens

log = logging.getLogger(__name__)

SCRATCH_BLOCK = b"\0\0\0\0"  # block 0 alone: a liveness request runs there, beside whatever the pool holds


@dataclass(slots=True)
class Part:
    """A launched piece of a step: the whole of it, unless a fault made us split it."""

    plan: StepPlan
    launched: object


@dataclass(slots=True)
class InFlight:
    plan: StepPlan
    parts: list[Part]
    errors: list[RowError]
    plan_ns: int


@dataclass(slots=True)
class Limits:
    """What the engine works with, fixed at warm-up."""

    window: int
    budget: PrefillBudget
    num_blocks: int
    kv_epoch: int
    world_size: int = 1
    decode_s: float = 0.0  # of the fastest step
    token_s: float = 0.0  # of one prompt token


@dataclass(slots=True)
class Pending:
    """Row changes that wait for the next step, and errors that wait for the next Step."""

    changes: RowChanges = field(default_factory=lambda: RowChanges([], [], []))
    errors: list[RowError] = field(default_factory=list)


class Engine:
    def __init__(self, device: Device, table: RequestTable, limits: Limits) -> None:
        self.table = table
        self.limits = limits
        self._device = device
        self._top_n = np.zeros(table.max_rows + 1, np.int64)
        self._in_flight: deque[InFlight] = deque()
        self._pending = Pending()
        self._number = 0  # of the last step launched or reported
        self._seen = 0

    # --- the stream --------------------------------------------------------

    def open(self) -> Step:
        """A new stream: no rows, steps count from 0. What is still in flight will be dropped by the snapshot."""
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
            ),
        )

    def apply(self, command: Command) -> None:
        """Cancel, then grow, then admit; all of it before the next step (rule 1). Unknown handles are ignored (rule
        4)."""
        self._seen = max(self._seen, command.seen)
        for handle in command.cancel:
            self._remove(handle)
        for handle, blocks in command.grow:
            self._grow(handle, blocks)
        for admit in command.admit:
            self._admit(admit)

    def _grow(self, handle: int, blocks: bytes) -> None:
        row = self.table.row_of(handle)
        if row is None:
            return
        before = int(self.table.num_blocks[row])
        try:
            numbers = self._checked_blocks(blocks, before)
        except ValueError as error:
            self._remove(handle)
            self._pending.errors.append(RowError(handle, "invalid", str(error)))
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
            if reason is not None:
                raise ValueError(reason)
            blocks = self._checked_blocks(admit.blocks, 0)
            row = self.table.add(admit)
        except (ValueError, LookupError) as error:
            log.error("request refused by the engine: %s", error)
            self._pending.errors.append(RowError(admit.handle, "invalid", str(error)))
            return
        self._top_n[row] = admit.top_n
        self._pending.changes.added.append((row, admit))
        self._pending.changes.blocks.append((row, 0, blocks))

    def _remove(self, handle: int) -> None:
        row = self.table.remove(handle)
        if row is None:
            return
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
        table = self.table
        remaining = table.num_ids - table.computed
        room = table.num_blocks * table.block_size - table.computed
        able = table.live & (table.num_ids < table.max_len) & (room > 0)
        if handles is not None:
            return self._plan_by_hand(handles, chunk_lens or {}, able, remaining, room)
        decode = np.flatnonzero(able & (remaining == 1))
        waiting = np.flatnonzero(able & (remaining > 1))
        budget = self.limits.budget
        shares: list[tuple[int, int]] = []
        if len(waiting):
            order = waiting[np.lexsort((table.order[waiting], -table.priority[waiting]))]
            prompts = [Prompt(int(row), int(remaining[row]), int(room[row])) for row in order]
            shares = share_budget(prompts, budget.tokens(len(decode)), budget.chunked)
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
        )

    def launch(self, plan: StepPlan, plan_ns: int = 0) -> None:
        """Start the step. An exception of one request's making is found by halves and becomes that request's error."""
        changes, self._pending.changes = self._pending.changes, RowChanges([], [], [])
        if changes:
            self._device.apply(changes)
        self._number = plan.number
        errors: list[RowError] = []
        parts = self._launch_parts(plan, errors)
        for part in parts:
            rows = part.plan.rows
            self.table.computed[rows] += part.plan.query_lens
            self.table.num_ids[rows] += part.plan.samples
        for error in errors:
            self._remove(error.handle)
        self._in_flight.append(InFlight(plan, parts, errors, plan_ns))

    def _launch_parts(self, plan: StepPlan, errors: list[RowError]) -> list[Part]:
        try:
            return [Part(plan, self._device.launch(plan))]
        except Exception as error:
            if self.limits.world_size > 1:
                raise  # the other ranks have the plan already: the group restarts
            log.exception("step %d with %d rows failed to launch", plan.number, plan.num_rows)
            if plan.num_rows == 1:
                errors.append(RowError(int(plan.handles[0]), "generation", f"{type(error).__name__}: {error}"))
                return []
            middle = plan.num_rows // 2
            return [
                *self._launch_parts(plan.part(0, middle), errors),
                *self._launch_parts(plan.part(middle, plan.num_rows), errors),
            ]

    def collect(self) -> Step:
        """Wait for the oldest step in flight and read it by its own snapshot (rule 2)."""
        flight = self._in_flight.popleft()
        started = time.perf_counter_ns()
        step = self._empty_step(flight.plan.number)
        ends = bytearray()
        forward_ns = 0
        for part in flight.parts:
            chosen = self._device.collect(part.launched)
            forward_ns += chosen.forward_ns
            self._read(part.plan, chosen, step, ends)
            self._report_progress(part.plan, step)
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

    def _read(self, plan: StepPlan, chosen: Chosen, step: Step, ends: bytearray) -> None:
        table = self.table
        index = -1
        for handle, row, samples in zip(plan.handles.tolist(), plan.rows.tolist(), plan.samples.tolist()):
            if not samples:
                continue
            index += 1
            if int(table.handle[row]) != handle:
                continue  # it ended meanwhile: this result is one too many
            token = int(chosen.ids[index])
            table.num_seen[row] += 1
            end = EndReason.RUNNING
            if chosen.is_nan[index]:
                end = EndReason.NAN
            elif token in table.end_ids[row]:
                end = self._end_of(row, token)
            elif table.num_seen[row] >= table.max_len[row]:
                end = EndReason.LENGTH
            step.handles.append(handle)
            step.token_ids.append(token)
            step.logprobs.append(float(chosen.logprobs[index]))
            ends.append(end)
            top_n = int(self._top_n[row])
            if top_n and chosen.top_ids is not None and chosen.top_logprobs is not None:
                logprobs = chosen.top_logprobs[index].tolist()
                count = keep_top(logprobs, top_n)
                ids = array("I", chosen.top_ids[index, :count].tolist())
                step.top_tokens.append(TopTokens(handle, 0, ids, array("f", logprobs[:count])))
            if end is not EndReason.RUNNING:
                self._remove(handle)

    def _end_of(self, row: int, token: int) -> EndReason:
        """EOS wins over length on the last token; an id that is both EOS and stop id is EOS."""
        stopping = self.table.stopping[row]
        assert stopping is not None
        return EndReason.EOS if token in stopping.eos_ids and not stopping.ignore_eos else EndReason.STOP_ID

    def _report_progress(self, plan: StepPlan, step: Step) -> None:
        reading = ~plan.samples
        for handle, row, computed in zip(
            plan.handles[reading].tolist(),
            plan.rows[reading].tolist(),
            (plan.starts + plan.query_lens)[reading].tolist(),
        ):
            if int(self.table.handle[row]) == handle:
                step.progress_handles.append(handle)
                step.computed_len.append(computed)

    def _rows_waiting(self) -> int:
        table = self.table
        room = table.num_blocks * table.block_size - table.computed
        return int(np.count_nonzero(table.live & (table.num_ids < table.max_len) & (room <= 0)))

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
