"""A shard without tensors and threads: plans steps as the engine does, and says what each computes.

Every row gets the tokens that the trace wrote for it; nothing else about a model matters to a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulator.machine import Machine, Work
from benchmarks.simulator.replay import Answer, Counts
from tgi.enums import EndReason
from tgi.router.memory.packed import BLOCK_BYTES, ID_BYTES
from tgi.server.engine.plan import Prompt, share_budget
from tgi.shard_client.messages import Admit, Command, Opening, Step, Timings

EPOCH = 1


@dataclass(slots=True, eq=False)
class Row:
    """`computed` and `num_ids` are as of the last launch, `num_generated` as of the last collect."""

    handle: int
    answer: Answer
    ids: memoryview  # the answer's tokens
    priority: int
    cached: int
    num_given: int  # ids it came with
    limit: int  # tokens
    room: int  # tokens
    computed: int
    num_ids: int
    num_generated: int
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A step on its way: its own list of (row, first position, tokens, yields one)."""

    parts: list[tuple[Row, int, int, bool]]
    work: Work


class SimulatedShard:
    """`answer_of` finds what a row is to say, by the seed of its sampling."""

    def __init__(self, machine: Machine, counts: Counts, answer_of: Callable[[int], Answer]) -> None:
        self.opening = Opening(
            machine.window, machine.max_rows, machine.num_blocks(machine.block_size), machine.block_size
        )
        self.rows: dict[int, Row] = {}
        self._counts = counts
        self._answer_of = answer_of
        self._budget = machine.budget
        self._launched = self._collected = self._seen = 0  # steps

    def open(self) -> Step:
        return Step(0, EPOCH, opening=self.opening, free_rows=self.opening.max_rows)

    def apply(self, command: Command) -> None:
        self._seen = command.seen
        for handle in command.cancel:
            self._end(handle)
        for handle, blocks in command.grow:
            row = self.rows.get(handle)
            if row is not None:
                row.room += len(blocks) // BLOCK_BYTES * self.opening.block_size
        for admit in command.admit:
            self.rows[admit.handle] = self._row(admit)
        assert len(self.rows) <= self.opening.max_rows, "more rows than there are"

    @property
    def empty_tokens(self) -> int:
        """What rows have room for and have not written."""
        return sum(row.room - row.computed for row in self.rows.values())

    def launch(self) -> Launch | None:
        """The next step: rows with one token left, then prompts under the budget. None: nothing can run."""
        if self._launched >= self._seen + self.opening.window:
            return None
        able = [row for row in self.rows.values() if row.num_ids < row.limit and row.computed < row.room]
        parts = [(row, 1) for row in able if row.num_ids - row.computed == 1]
        num_decode = len(parts)
        reading = sorted((row for row in able if row.num_ids - row.computed > 1), key=lambda row: -row.priority)
        if reading:
            prompts = [
                Prompt(index, row.num_ids - row.computed, row.room - row.computed) for index, row in enumerate(reading)
            ]
            shares = share_budget(prompts, self._budget.tokens(num_decode), self._budget.chunked)
            parts += [(reading[index], tokens) for index, tokens in shares]
        if not parts:
            return None
        self._launched += 1
        return self._compose(parts, num_decode)

    def skip(self) -> Step:
        """A step without results: nothing can run though rows exist."""
        self._launched += 1
        return self._step()

    def collect(self, launch: Launch) -> Step:
        step = self._step()
        ends: list[int] = []
        for row, begin, tokens, yields in launch.parts:
            end = begin + tokens
            self._counts.add_computed(row.answer, begin, end, max(0, min(end, row.num_given) - begin))
            if row.has_ended:
                continue  # its result is nobody's
            if not yields:
                step.progress_handles.append(row.handle)
                step.computed_len.append(end)
                continue
            step.handles.append(row.handle)
            step.token_ids.append(row.ids[row.num_generated])
            step.logprobs.append(0.0)
            row.num_generated += 1
            ends.append(EndReason.EOS if row.num_generated == len(row.ids) else EndReason.RUNNING)
            if ends[-1]:
                self._end(row.handle)
        step.ends = bytes(ends) if any(ends) else b""
        work = launch.work
        step.timings = Timings(steps=1, prefill_tokens=work.prefill_tokens, decode_tokens=work.decode_rows)
        return step

    def _compose(self, parts: list[tuple[Row, int]], num_decode: int) -> Launch:
        launched: list[tuple[Row, int, int, bool]] = []
        context = 0
        for row, tokens in parts:
            begin = row.computed
            row.computed += tokens
            context += row.computed
            yields = row.computed == row.num_ids
            row.num_ids += yields
            launched.append((row, begin, tokens, yields))
        prefill = sum(tokens for _, tokens in parts[num_decode:])
        return Launch(launched, Work(num_decode, context, prefill))

    def _step(self) -> Step:
        self._collected += 1
        step = Step(self._collected, EPOCH)
        step.rows_running = len(self.rows)
        step.free_rows = self.opening.max_rows - len(self.rows)
        return step

    def _row(self, admit: Admit) -> Row:
        answer = self._answer_of(admit.sampling.seed)
        num_prompt, num_generated = len(admit.prompt_ids) // ID_BYTES, len(admit.generated_ids) // ID_BYTES
        answer.computed = max(answer.computed, admit.cached_len)
        return Row(
            handle=admit.handle,
            answer=answer,
            ids=memoryview(answer.turn.answer).cast("I"),
            priority=admit.priority,
            cached=admit.cached_len,
            num_given=num_prompt + num_generated,
            limit=num_prompt + admit.stopping.max_new_tokens,
            room=len(admit.blocks) // BLOCK_BYTES * self.opening.block_size,
            computed=admit.cached_len,
            num_ids=num_prompt + num_generated,
            num_generated=num_generated,
        )

    def _end(self, handle: int) -> None:
        row = self.rows.pop(handle, None)
        if row is None:
            return  # it has ended meanwhile
        row.has_ended = True
        self._counts.reserved_tokens += row.room - row.cached
        self._counts.unused_tokens += row.room - row.computed
