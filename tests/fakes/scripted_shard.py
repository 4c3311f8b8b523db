"""PlainShard: a shard in plain Python that keeps the seven rules and checks that the router keeps them too.

Its KV cache stores in each slot a hash of the whole prefix up to that position, so a read sees at once whether the slot
is the row's own or an equal prefix that somebody published. The next token is a function of the prefix (and of the
sampling's seed), so a resumed row must go on with the same tokens. It composes steps like the engine: decode rows
first, then prefill under a budget, in chunks or whole; launches up to `lag` steps before it collects, and the device
executes a step only then. A row may be one that kills it.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tgi.enums import EndReason
from tgi.router.validation.request import ValidRequest
from tgi.shard_client.messages import (
    Admit,
    BlockMoves,
    Command,
    Opening,
    PromptLogprobs,
    RowError,
    Step,
    Timings,
    TopTokens,
)

_MASK = (1 << 64) - 1


def ids_of(packed: bytes) -> list[int]:
    return memoryview(packed).cast("I").tolist()


def pack(ids: Iterable[int]) -> bytes:
    return array("I", ids).tobytes()


def extend_hash(previous: int, token_id: int) -> int:
    mixed = (previous ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return (mixed ^ (mixed >> 29)) & _MASK


def next_token(prefix_hash: int, vocab_size: int, seed: int = 0) -> int:
    return ((prefix_hash ^ seed) * 0x94D049BB133111EB & _MASK) % vocab_size


def reference(
    prompt_ids: bytes, max_new_tokens: int, vocab_size: int, eos_ids: tuple[int, ...] = (), seed: int = 0
) -> list[int]:
    """The tokens that the scripted model generates for a prompt, whatever happens on the way. `seed`: of a request that
    samples."""
    prefix_hash = 0
    for token_id in ids_of(prompt_ids):
        prefix_hash = extend_hash(prefix_hash, token_id)
    generated: list[int] = []
    while len(generated) < max_new_tokens:
        generated.append(next_token(prefix_hash, vocab_size, seed))
        if generated[-1] in eos_ids:
            break
        prefix_hash = extend_hash(prefix_hash, generated[-1])
    return generated


def alone(request: ValidRequest, vocab_size: int) -> list[int]:
    """What an undisturbed run of a request gives that ends by its length."""
    seed = request.sampling.seed if request.sampling.do_sample else 0
    return reference(request.prompt_ids, request.stopping.max_new_tokens, vocab_size, seed=seed)


class ShardDied(Exception):
    """The process is gone, with all its rows and its cache. `renew_cache` and `open` start the next one."""


class Row:
    """A row twice: what the device has, and what the host knows or has planned for it."""

    def __init__(self, admit: Admit) -> None:
        self.admit = admit
        self.blocks = ids_of(admit.blocks)
        self.ids = ids_of(admit.prompt_ids) + ids_of(admit.generated_ids)  # device
        self.hashes: list[int] = []  # device; of the prefix up to each id
        for token_id in self.ids:
            self.hashes.append(extend_hash(self.hashes[-1] if self.hashes else 0, token_id))
        self.num_prompt = len(admit.prompt_ids) // 4
        self.limit = self.num_prompt + admit.stopping.max_new_tokens
        self.planned_computed = admit.cached_len  # host
        self.planned_tokens = len(self.ids)  # host; the most it can have once all that is launched is done
        self.num_launched = 0  # not yet collected
        self.num_tokens = len(self.ids)  # host: collected
        self.has_ended = False  # host

    def commit(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.hashes.append(extend_hash(self.hashes[-1], token_id))


@dataclass
class Launch:
    """A step on its way: its own list of rows (rule 2), with the block tables of that moment."""

    number: int
    work: list[tuple[Row, tuple[int, ...], int, int, bool]] = field(
        default_factory=list
    )  # row, table, begin, end, yields
    moves: list[BlockMoves] = field(default_factory=list)  # before all that


class PlainShard:
    """Use: `open()`, then `apply(command)` and `advance()` in any order. An AssertionError is a broken rule."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        window: int = 4,
        max_rows: int = 8,
        prefill_budget: int = 64,
        lag: int = 1,
        speculated: int = 0,
        vocab_size: int = 50,
        kv_epoch: int = 1,
        num_host_blocks: int = 0,
        chunks: bool = True,
    ) -> None:
        self.opening = Opening(window, max_rows, num_blocks, block_size, num_host_blocks)
        self.prefill_budget = prefill_budget
        self.lag = lag
        self.speculated = speculated
        self.vocab_size = vocab_size
        self.chunks = chunks  # else a prompt is read whole, though it be larger than the budget
        self.kills: Callable[[Row], bool] = lambda row: False  # does a step with this row end the process?
        self.poison_ids: frozenset[int] = frozenset()  # a row that holds one gets an error at its next step
        self.nan_ids: frozenset[int] = frozenset()  # a row that holds one yields NaN
        self.script: list[int] = []  # if given, what every answer says, its last id for ever after
        self.log: list[Command] = []
        self.num_computed = 0  # positions, all rows, all streams
        self.max_ahead = 0  # steps launched beyond `seen`
        self.largest_step = 0  # tokens
        self.renew_cache(kv_epoch)
        self._drop_rows()

    # -- the wire ------------------------------------------------------------------------------------------------------

    def open(self, owner: str = "") -> Step:
        """A new stream: no rows, Step 0."""
        while self._launched:
            self._execute(self._launched.popleft())  # the device finishes what it was given
        self._drop_rows()
        return Step(0, self.kv_epoch, opening=self.opening, free_rows=self.opening.max_rows)

    def renew_cache(self, kv_epoch: int) -> None:
        """As after a restart: nothing is in the cache."""
        self.kv_epoch = kv_epoch
        self._launched = deque()
        self._cache: list[int | None] = [None] * (self.opening.num_blocks * self.opening.block_size)
        self._host: list[int | None] = [None] * (self.opening.num_host_blocks * self.opening.block_size)
        self._moves: list[BlockMoves] = []  # due before the next step

    def apply(self, command: Command) -> None:
        self.log.append(command)
        assert self.seen <= command.seen <= self.sent, f"seen {command.seen}, but {self.sent} steps were sent"
        self.seen = command.seen
        if command.moves:
            self._moves.append(command.moves)
        for handle in command.cancel:
            self._end(handle)
        for handle, blocks in command.grow:
            row = self.rows.get(handle)
            if row is not None:  # rule 4: it may have ended meanwhile
                self._claim(handle, ids_of(blocks))
                row.blocks += ids_of(blocks)
        for admit in command.admit:
            self._admit(admit)
        assert len(self.rows) <= self.opening.max_rows, "more rows than there are"
        self._has_said_idle = False

    def advance(self) -> Step | None:
        """Launch what may be launched, then collect one step; None when there is nothing to tell. Raises ShardDied."""
        while len(self._launched) <= self.lag and self._launch():
            pass
        if self._launched:
            return self._collect(self._launched.popleft())
        if self.rows and not self._has_said_idle and self.number < self.seen + self.opening.window:
            self._has_said_idle = True
            self.number = self.sent = self.number + 1
            return self._step(self.number)
        return None

    # -- the host's side -----------------------------------------------------------------------------------------------

    def _drop_rows(self) -> None:
        self.rows: dict[int, Row] = {}
        self._writers: dict[int, int] = {}  # block -> handle of the row that may write it
        self._launched: deque[Launch] = deque()
        self._has_said_idle = False
        self.last_handle = 0
        self.number = self.sent = self.seen = 0

    def _admit(self, admit: Admit) -> None:
        block_size = self.opening.block_size
        assert self.last_handle < admit.handle < 1 << 64, "handles count up (rule 4)"
        self.last_handle = admit.handle
        row = Row(admit)
        assert admit.cached_len % block_size == 0, "cached_len is whole blocks (rule 5)"
        assert admit.cached_len < len(row.ids), "something is left to compute (rule 5)"
        assert len(row.blocks) * block_size >= len(row.ids), "blocks for all ids"
        assert row.num_tokens < row.limit, "something is left to generate"
        assert len(set(row.blocks)) == len(row.blocks), "a block twice in one row"
        assert 0 not in row.blocks, "block 0 is scratch"
        self._claim(admit.handle, row.blocks[admit.cached_len // block_size :])
        self.rows[admit.handle] = row

    def _claim(self, handle: int, blocks: list[int]) -> None:
        for block in blocks:
            assert 0 < block < self.opening.num_blocks, f"block {block} is nobody's to give"
            assert block not in self._writers, f"block {block} belongs to row {self._writers.get(block)}"
            self._writers[block] = handle

    def _end(self, handle: int) -> None:
        row = self.rows.pop(handle, None)
        if row is not None:
            row.has_ended = True
            for block in row.blocks[row.admit.cached_len // self.opening.block_size :]:
                del self._writers[block]

    def _launch(self) -> bool:
        if self.number >= self.seen + self.opening.window:
            return False
        launch = Launch(self.number + 1)
        budget = self.prefill_budget
        decoding = [
            row
            for row in self.rows.values()
            if row.planned_computed >= len(row.admit.prompt_ids) // 4 + len(row.admit.generated_ids) // 4
        ]
        for row in decoding:
            last = min(row.planned_tokens + self.speculated, row.limit)  # tokens whose slots it may write
            if row.planned_tokens >= row.limit or last > len(row.blocks) * self.opening.block_size:
                continue
            launch.work.append((row, tuple(row.blocks), -1, -1, True))
            row.planned_tokens = min(row.planned_tokens + 1 + self.speculated, row.limit)
            row.num_launched += 1
            budget -= 1
        prefilling = [row for row in self.rows.values() if row not in decoding]
        for row in sorted(prefilling, key=lambda row: -row.admit.priority):
            total = len(row.admit.prompt_ids) // 4 + len(row.admit.generated_ids) // 4
            size = total - row.planned_computed
            if self.chunks:
                size = min(budget, size)
            elif size > budget and any(work[2] >= 0 for work in launch.work):
                break  # alone it may be larger
            if size <= 0:
                break
            budget -= size
            begin, end = row.planned_computed, row.planned_computed + size
            row.planned_computed = end
            row.num_launched += 1
            launch.work.append((row, tuple(row.blocks), begin, end, end == total))
            if end == total:
                row.planned_tokens += 1
        if not launch.work:
            return False
        if any(self.kills(work[0]) for work in launch.work):
            raise ShardDied
        launch.moves, self._moves = self._moves, []
        self.number = launch.number
        self.max_ahead = max(self.max_ahead, self.number - self.seen)
        self._launched.append(launch)
        return True

    def _collect(self, launch: Launch) -> Step:
        step = self._step(launch.number)
        prefill_tokens = decode_tokens = 0
        counts: list[int] = []
        ends: list[int] = []
        for (row, _, begin, end, _), tokens in zip(launch.work, self._execute(launch)):
            if begin >= 0:
                prefill_tokens += end - begin
            else:
                decode_tokens += 1
            row.num_launched -= 1
            handle = row.admit.handle
            if row.has_ended:
                continue  # its result is nobody's (rule 2)
            if self.poison_ids.intersection(row.ids):
                self._end(handle)
                step.errors.append(RowError(handle, "launch", "the forward failed"))
                continue
            if 0 <= begin < row.num_prompt and row.admit.prompt_logprobs:
                values = [-p / 8 if p else math.nan for p in range(begin, min(end, row.num_prompt))]
                top_n = row.admit.prompt_top_n
                best = array("I", [p + rank for p in range(begin, begin + len(values)) for rank in range(top_n)])
                tops = array("f", [value - rank for value in values for rank in range(top_n)])
                step.prompt_logprobs.append(PromptLogprobs(handle, begin, array("f", values), best, tops))
            if not tokens:
                step.progress_handles.append(handle)
                step.computed_len.append(end)
                continue
            kept, reason = self._stop(row, tokens)
            row.num_tokens += len(kept)
            if self.nan_ids.intersection(row.ids):
                reason = EndReason.NAN
            for index, token_id in enumerate(kept):
                step.token_ids.append(token_id)
                step.logprobs.append(-token_id / 16)
                if row.admit.top_n:
                    best = array("I", [token_id, *range(row.admit.top_n - 1)])
                    step.top_tokens.append(TopTokens(handle, index, best, array("f", [-0.5] * row.admit.top_n)))
            step.handles.append(handle)
            counts.append(len(kept))
            ends.append(reason)
            if reason:
                self._end(handle)
            elif not row.num_launched:
                row.planned_tokens = row.num_tokens  # a guess no longer
        step.num_tokens = bytes(counts) if any(count != 1 for count in counts) else b""
        step.ends = bytes(ends) if any(ends) else b""
        step.timings = Timings(1, 1000, 10, 1, prefill_tokens, decode_tokens)
        self.largest_step = max(self.largest_step, prefill_tokens + decode_tokens)
        self.sent = launch.number
        return step

    def _stop(self, row: Row, tokens: list[int]) -> tuple[list[int], EndReason]:
        stopping = row.admit.stopping
        kept: list[int] = []
        for token_id in tokens:
            kept.append(token_id)
            if token_id in stopping.eos_ids and not stopping.ignore_eos:
                return kept, EndReason.EOS
            if token_id in stopping.stop_ids:
                return kept, EndReason.STOP_ID
            if row.num_tokens + len(kept) >= row.limit:
                return kept, EndReason.LENGTH
        return kept, EndReason.RUNNING

    def _step(self, number: int) -> Step:
        step = Step(number, self.kv_epoch)
        step.rows_running = len(self.rows)
        step.free_rows = self.opening.max_rows - len(self.rows)
        return step

    # -- the device's side ---------------------------------------------------------------------------------------------

    def _execute(self, launch: Launch) -> list[list[int]]:
        """Tokens per row of the launch. Knows only the device's state: a row may have ended without it being told."""
        for moves in launch.moves:
            self._move(moves)
        results: list[list[int]] = []
        for row, table, begin, end, yields in launch.work:
            is_decode = begin < 0
            if is_decode:
                begin = len(row.ids) - 1
                end = min(len(row.ids) + self.speculated, row.limit)
            known = min(end, len(row.ids))
            self.num_computed += known - begin
            for position in range(begin, end):
                self._write(table, position, row.hashes[position] if position < known else ~position)
            self._read(row, table, known)
            tokens: list[int] = []
            if yields:
                # Drafts: as many tokens as a prefix-dependent number of accepted guesses allows.
                accepted = row.hashes[-1] % (1 + self.speculated) if is_decode else 0
                for _ in range(min(1 + accepted, max(1, row.limit - len(row.ids)))):
                    token_id = self._choose(row)
                    tokens.append(token_id)
                    position = len(row.ids)
                    row.commit(token_id)
                    if accepted and position < end:  # an accepted draft's KV was written by this very step
                        self._write(table, position, row.hashes[position])
            results.append(tokens)
        return results

    def _move(self, moves: BlockMoves) -> None:
        size = self.opening.block_size
        for to_host, source, target in zip(moves.to_host, ids_of(moves.sources), ids_of(moves.targets), strict=True):
            here, there = (self._cache, self._host) if to_host else (self._host, self._cache)
            block = here[source * size : (source + 1) * size]
            assert len(block) == size, "a block is taken from where there is none"
            assert None not in block, "a block is taken that nobody has written"
            assert target * size < len(there), "a block goes to where there is none"
            there[target * size : (target + 1) * size] = block

    def _choose(self, row: Row) -> int:
        if self.script:
            return self.script[min(len(row.ids) - row.num_prompt, len(self.script) - 1)]
        sampling = row.admit.sampling
        return next_token(row.hashes[-1], self.vocab_size, sampling.seed if sampling.do_sample else 0)

    def _write(self, table: tuple[int, ...], position: int, value: int) -> None:
        block_size = self.opening.block_size
        self._cache[table[position // block_size] * block_size + position % block_size] = value

    def _read(self, row: Row, table: tuple[int, ...], length: int) -> None:
        block_size = self.opening.block_size
        for index, first in enumerate(range(0, length, block_size)):
            count = min(block_size, length - first)
            slot = table[index] * block_size
            assert self._cache[slot : slot + count] == row.hashes[first : first + count], (
                f"row {row.admit.handle} reads foreign values at positions {first}..{first + count - 1}"
            )


def merge(steps: list[Step]) -> Step:
    """What a shard sends when its reader was slow: one Step for several."""
    merged = Step(steps[-1].number, steps[-1].kv_epoch)
    tokens: dict[int, tuple[list[int], list[float], int]] = {}
    progress: dict[int, int] = {}
    for step in steps:
        position = 0
        for index, handle in enumerate(step.handles):
            count = step.num_tokens[index] if step.num_tokens else 1
            ids, logprobs, _ = tokens.get(handle, ([], [], 0))
            for top in step.top_tokens:
                if top.handle == handle:
                    merged.top_tokens.append(TopTokens(handle, top.index + len(ids), top.token_ids, top.logprobs))
            ids += step.token_ids[position : position + count].tolist()
            logprobs += step.logprobs[position : position + count].tolist()
            tokens[handle] = (ids, logprobs, step.ends[index] if step.ends else 0)
            progress.pop(handle, None)
            position += count
        progress.update(zip(step.progress_handles, step.computed_len))
        merged.prompt_logprobs += step.prompt_logprobs
        merged.errors += step.errors
    for handle, (ids, logprobs, end) in tokens.items():
        merged.handles.append(handle)
        merged.token_ids.extend(ids)
        merged.logprobs.extend(logprobs)
        merged.num_tokens += bytes([len(ids)])
        merged.ends += bytes([end])
    for handle, computed_len in progress.items():
        merged.progress_handles.append(handle)
        merged.computed_len.append(computed_len)
    merged.timings = Timings(steps=len(steps), decode_tokens=len(merged.token_ids))
    return merged
