"""Batches that a caller steps by hand: which rows, which blocks, what text. Knows no protobuf and no tensors.

A batch is a list of rows of the engine, each under a handle of ours; joining and filtering batches are list operations.
Who owns a row's blocks: the caller, when the request brought them; else `OwnBlocks` lends them until the row ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tgi.enums import EndReason, FinishReason
from tgi.errors import GenerationFailed, StartupError
from tgi.server.engine.service import StreamIsOpen
from tgi.shard_client.messages import (
    Admit,
    Command,
    Grammar,
    Health,
    Sampling,
    ShardInfo,
    Step,
    Stopping,
    TopTokens,
    WarmupRequest,
    WarmupResult,
)
from tgi.text.stream import TextStream
from tgi.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DEFAULT_PREFILL_TOKENS = 4096  # of a cache that nobody sized
WORD = 4  # bytes of a u32


class SteppableEngine(Protocol):
    """What stepping by hand needs of the model server. Every method may be called from any thread."""

    def info(self) -> ShardInfo: ...
    def health(self) -> Health: ...

    @property
    def warm(self) -> WarmupResult | None:
        """What the first Warmup answered; None before it."""
        ...

    def warmup(self, request: WarmupRequest) -> WarmupResult:
        """Size the cache, once. Raises StartupError when what is asked does not fit."""
        ...

    def step_by_hand(
        self, command: Command, handles: Sequence[int], chunk_lens: Mapping[int, int] | None = None
    ) -> Step | None:
        """Apply `command`, then run exactly these rows for one step: launch and collect.

        A row that still reads its prompt takes `chunk_lens[handle]` tokens, else all that is left. Without handles only
        the command is applied. A refused Admit is in the Step's errors. A row may be admitted on the scratch block 0
        alone. Raises StreamIsOpen while a router holds the stream.
        """
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the caller sent it, tokenised."""

    request_id: int
    prompt_ids: bytes
    cache_len: int  # tokens already in the cache, any number below the prompt's
    chunk_len: int | None  # tokens of the first step behind cache_len
    blocks: tuple[int, ...]  # empty: lend some
    sampling: Sampling
    max_new_tokens: int
    ignore_eos: bool
    stop_strings: tuple[str, ...]
    top_n: int
    prompt_logprobs: bool
    adapter_id: str
    grammar: Grammar | None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids) // WORD

    @property
    def num_slots(self) -> int:
        """Tokens whose KV is ever stored: the last one chosen never is."""
        return self.prompt_len + self.max_new_tokens - 1


@dataclass(slots=True, eq=False)
class Row:
    asked: Asked
    handle: int
    stream: TextStream
    blocks: tuple[int, ...]
    is_lent: bool  # the blocks are of OwnBlocks
    computed: int
    next_len: int  # tokens of the next step
    num_generated: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Prompt tokens still to read; 0 once ids are generated."""
        return 0 if self.num_generated else self.asked.prompt_len - self.computed


@dataclass(slots=True)
class Batch:
    batch_id: int
    rows: list[Row]

    @property
    def num_blocks(self) -> int:
        return sum(len(row.blocks) for row in self.rows)

    @property
    def next_tokens(self) -> int:
        return sum(row.next_len for row in self.rows)


@dataclass(frozen=True, slots=True)
class Token:
    token_id: int
    logprob: float
    text: str
    is_special: bool
    top: TopTokens | None


@dataclass(slots=True)
class Generated:
    """What one step gave one request."""

    row: Row
    tokens: list[Token]
    is_first: bool
    finish: FinishReason | None = None


@dataclass(slots=True)
class Outcome:
    generated: list[Generated]
    batch: Batch | None  # what goes on; None when all ended
    forward_ns: int


class OwnBlocks:
    """Blocks for requests that bring none: 1… up to the cache's size. Block 0 is scratch."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, 0, -1))

    def take(self, count: int) -> tuple[int, ...]:
        if count > len(self._free):
            raise GenerationFailed(f"{count} blocks are needed, but only {len(self._free)} are free")
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(sorted(blocks, reverse=True))


class Stepper:
    """The caller's batches by id. Not thread-safe: one call at a time."""

    def __init__(self, engine: SteppableEngine, tokenizer: Callable[[], Tokenizer], max_rows: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._max_prefill_tokens = DEFAULT_PREFILL_TOKENS
        self._batches: dict[int, Batch] = {}
        self._blocks: OwnBlocks | None = None
        self._last_handle = 0
        self._last_step = 0

    # --- the calls ---------------------------------------------------------------------------------------------

    def warmup(
        self, max_prefill_tokens: int, max_input_tokens: int | None = None, max_total_tokens: int | None = None
    ) -> WarmupResult:
        self._max_prefill_tokens = max_prefill_tokens or DEFAULT_PREFILL_TOKENS
        try:
            return self._engine.warmup(
                WarmupRequest(self._max_prefill_tokens, self._max_rows, max_input_tokens, max_total_tokens)
            )
        except StartupError as error:
            raise GenerationFailed(str(error)) from error

    def prefill(self, batch_id: int, asked: Sequence[Asked], join_to: int | None) -> Outcome:
        """Admit `asked` and run one step, together with batch `join_to`, whose id then stays."""
        if not asked:
            raise GenerationFailed("a batch needs at least one request")
        block_size = self._ensure_warm(asked)
        rows: list[Row] = []
        try:
            for request in asked:
                rows.append(self._row(request, block_size))  # noqa: PERF401 (at a fault, what was lent goes back)
            before = self._pop(join_to) if join_to is not None else None
        except BaseException:
            self._give_back(rows)
            raise
        batch = Batch(batch_id, rows) if before is None else Batch(before.batch_id, [*before.rows, *rows])
        if batch.batch_id in self._batches:
            self.clear(batch.batch_id)  # the id means another batch from here on
        return self._step(batch, Command(admit=[self._admit(row, block_size) for row in rows]))

    def decode(self, batch_ids: Sequence[int]) -> Outcome:
        """One step of all these batches as one; the first id stays."""
        if not batch_ids:
            raise GenerationFailed("Decode needs at least one batch")
        rows: list[Row] = []
        try:
            for batch_id in batch_ids:
                rows += self._pop(batch_id).rows
        except BaseException:
            self._drop(rows)  # nobody holds their batch any more
            raise
        return self._step(Batch(batch_ids[0], rows), Command())

    def filter(self, batch_id: int, request_ids: Sequence[int]) -> Batch:
        """Keep these requests, in this order; the others are cancelled."""
        batch = self._pop(batch_id)
        by_id = {row.asked.request_id: row for row in batch.rows}
        kept = [by_id[request_id] for request_id in request_ids if request_id in by_id]
        if not kept or len(kept) != len(request_ids):
            self._drop(batch.rows)
            raise GenerationFailed(f"batch {batch_id} does not hold the requests to keep ({list(request_ids)})")
        self._drop([row for row in batch.rows if row not in kept])
        self._batches[batch_id] = Batch(batch_id, kept)
        return self._batches[batch_id]

    def clear(self, batch_id: int | None) -> None:
        """Drop one batch, or all. A batch that does not exist is dropped already."""
        ids = list(self._batches) if batch_id is None else [batch_id]
        self._drop([row for one in ids if one in self._batches for row in self._batches.pop(one).rows])

    # --- one step ----------------------------------------------------------------------------------------------

    def _step(self, batch: Batch, command: Command) -> Outcome:
        rows = {row.handle: row for row in batch.rows}
        chunks = {row.handle: row.next_len for row in batch.rows if row.remaining > 1}
        try:
            step = self._engine.step_by_hand(command, list(rows), chunks)
            if step is None:
                raise GenerationFailed(f"batch {batch.batch_id} cannot run: its rows are gone")
            self._notice_other_stream(step)
            self._check(batch, step)
            outcome = self._read(batch, step)
        except StreamIsOpen:
            self._forget()  # opening the stream has dropped all rows
            self._give_back(batch.rows)
            raise
        except BaseException:
            self._drop(batch.rows)
            raise
        return outcome

    def _check(self, batch: Batch, step: Step) -> None:
        ours = {row.handle: row.asked.request_id for row in batch.rows}
        faults = [f"request {ours[error.handle]}: {error.message}" for error in step.errors if error.handle in ours]
        faults += [
            f"request {ours[handle]}: the model's logits are not numbers"
            for index, handle in enumerate(step.handles)
            if handle in ours and step.end_of(index) is EndReason.NAN
        ]
        if faults:
            raise GenerationFailed("; ".join(faults))
        silent = ours.keys() - set(step.handles) - set(step.progress_handles)
        if silent:
            ids = sorted(ours[handle] for handle in silent)
            raise GenerationFailed(f"batch {batch.batch_id}: requests {ids} are gone, a router's stream has taken over")

    def _read(self, batch: Batch, step: Step) -> Outcome:
        rows = {row.handle: row for row in batch.rows}
        for handle, computed in zip(step.progress_handles, step.computed_len, strict=True):
            if handle in rows:
                rows[handle].computed = computed
        for entry in step.prompt_logprobs:
            if entry.handle in rows:
                rows[entry.handle].prompt_logprobs += entry.logprobs
        tops = {(top.handle, top.index): top for top in step.top_tokens}
        generated: list[Generated] = []
        ended: list[Row] = []
        stopped: list[Row] = []
        position = 0
        for index, handle in enumerate(step.handles):
            count = step.num_tokens[index] if step.num_tokens else 1
            row = rows.get(handle)
            if row is not None:
                columns = zip(step.token_ids[position : position + count], step.logprobs[position : position + count])
                one = self._tokens(row, list(columns), step.end_of(index), tops)
                generated.append(one)
                if one.finish is not None:
                    ended.append(row)
                    if one.finish is FinishReason.STOP_SEQUENCE and step.end_of(index) is EndReason.RUNNING:
                        stopped.append(row)
            position += count
        self._drop(stopped)
        self._give_back([row for row in ended if row not in stopped])
        going_on = [row for row in batch.rows if row not in ended]
        left = Batch(batch.batch_id, going_on) if going_on else None
        if left is not None:
            self._plan_chunks(left)
            self._batches[left.batch_id] = left
        return Outcome(generated, left, step.timings.forward_ns)

    def _tokens(
        self,
        row: Row,
        columns: Sequence[tuple[int, float]],
        end: EndReason,
        tops: Mapping[tuple[int, int], TopTokens],
    ) -> Generated:
        one = Generated(row, [], is_first=not row.num_generated)
        for index, (token_id, logprob) in enumerate(columns):
            piece = row.stream.push(token_id)
            row.num_generated += 1
            row.computed = row.asked.prompt_len + row.num_generated - 1
            is_last = index == len(columns) - 1
            text = piece.text
            # EOS beats a stop string, which beats length.
            if is_last and end is EndReason.EOS:
                one.finish = FinishReason.EOS_TOKEN
            elif piece.stop is not None:
                one.finish = FinishReason.STOP_SEQUENCE
            elif is_last and end is not EndReason.RUNNING:
                one.finish = FinishReason.LENGTH
            if one.finish is not None and piece.stop is None:
                rest = row.stream.finish()
                text += "" if piece.special else rest
            one.tokens.append(Token(token_id, logprob, text, piece.special, tops.get((row.handle, index))))
            if one.finish is not None:
                break  # what was generated behind a stop string is dropped
        return one

    def _plan_chunks(self, batch: Batch) -> None:
        """The next step's tokens: one for each row that generates; the rest of the budget, from the last row to the
        first, for prompts that are not read yet, at least one each."""
        budget = self._max_prefill_tokens - (len(batch.rows) - 1)
        for row in reversed(batch.rows):
            if row.remaining:
                row.next_len = max(1, min(row.remaining, budget))
                budget -= row.next_len
            else:
                row.next_len = 1

    # --- rows --------------------------------------------------------------------------------------------------

    def _ensure_warm(self, asked: Sequence[Asked]) -> int:
        """The block size of the cache, which is sized now unless it is."""
        warm = self._engine.warm
        if warm is None:
            log.info("Prefill before any Warmup: the KV cache is sized now")
            tokens = sum(request.prompt_len for request in asked)
            warm = self.warmup(max(DEFAULT_PREFILL_TOKENS, tokens))
        if self._blocks is None:
            self._blocks = OwnBlocks(warm.num_blocks)
        return warm.block_size

    def _row(self, asked: Asked, block_size: int) -> Row:
        where = f"request {asked.request_id}"
        if not 0 <= asked.cache_len < asked.prompt_len:
            raise GenerationFailed(f"{where}: cache_len {asked.cache_len} must be below its {asked.prompt_len} tokens")
        if asked.max_new_tokens < 1:
            raise GenerationFailed(f"{where}: max_new_tokens must be at least 1")
        needed = -(-asked.num_slots // block_size)
        is_lent = not asked.blocks
        if not is_lent and len(asked.blocks) < needed:
            raise GenerationFailed(
                f"{where}: {asked.num_slots} tokens need {needed} blocks of {block_size}, it has {len(asked.blocks)}"
            )
        stream = TextStream(self._tokenizer(), asked.prompt_ids, asked.stop_strings, include_stop=True)
        assert self._blocks is not None
        blocks = self._blocks.take(needed) if is_lent else asked.blocks
        self._last_handle += 1
        # Whole blocks only are taken from the cache (rule 5); what is computed again is what stands there already.
        cached_len = asked.cache_len // block_size * block_size
        chunk = asked.prompt_len - cached_len
        if asked.chunk_len is not None:
            chunk = min(chunk, max(1, asked.chunk_len) + asked.cache_len - cached_len)
        return Row(asked, self._last_handle, stream, blocks, is_lent, computed=cached_len, next_len=chunk)

    def _admit(self, row: Row, block_size: int) -> Admit:
        asked = row.asked
        return Admit(
            handle=row.handle,
            prompt_ids=asked.prompt_ids,
            generated_ids=b"",
            cached_len=row.computed,
            blocks=b"".join(block.to_bytes(WORD, "little") for block in row.blocks),
            sampling=asked.sampling,
            stopping=Stopping(
                max_new_tokens=asked.max_new_tokens,
                eos_ids=self._tokenizer().eos_ids,
                ignore_eos=asked.ignore_eos,
            ),
            top_n=asked.top_n,
            prompt_logprobs=asked.prompt_logprobs,
            adapter_id=asked.adapter_id,
            grammar=asked.grammar,
        )

    def _pop(self, batch_id: int) -> Batch:
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            # A router's stream took the batches along: then that is what must be said, and this raises it.
            self._engine.step_by_hand(Command(), ())
            raise GenerationFailed(f"Batch ID {batch_id} not found in cache.")
        return batch

    def _drop(self, rows: Sequence[Row]) -> None:
        """End rows that the engine still has. It does not matter whether it does."""
        if not rows:
            return
        self._give_back(rows)
        with contextlib.suppress(StreamIsOpen):  # opening the stream has dropped all rows
            self._engine.step_by_hand(Command(cancel=[row.handle for row in rows]), ())

    def _give_back(self, rows: Sequence[Row]) -> None:
        if self._blocks is not None:
            self._blocks.give_back(block for row in rows if row.is_lent for block in row.blocks)

    def _notice_other_stream(self, step: Step) -> None:
        """A stream that came and went has dropped every row: step numbers begin anew."""
        if step.number <= self._last_step:
            self._forget()
        self._last_step = step.number

    def _forget(self) -> None:
        self._give_back([row for batch in self._batches.values() for row in batch.rows])
        self._batches.clear()
        self._last_step = 0
