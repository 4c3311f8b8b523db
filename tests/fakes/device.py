"""FakeDevice: a device that stores in each KV slot what a real one would depend on, and checks every read.

The KV of a position depends on all ids up to it, so a slot holds the digest of that prefix. A step reads the slots of
every earlier position through the row's block table and compares them with the row's own ids: a block given away too
early, a missing copy, a wrong slot or a wrong id shows at once. The chosen id is a function of the digest and the seed,
so runs can be compared. Each row counts what it has chosen in a slot that the host gives away at once, as penalties do:
a choice must find there the row's own ids and nothing else. Work is done late (`lag` steps behind its launch), in
order: what a launch takes from the host is taken then.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.engine.device import Chosen, Constraint, PromptScores
from tgi.server.sampling.slots import Slots
from tgi.shard_client.messages import Admit, BlockMoves

EMPTY = b""


class Corrupt(BaseException):
    """A read saw something else than its own prefix. No Exception: the engine must not make it a request's error."""


def extend(digest: bytes, token: int) -> bytes:
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=8).digest()


def choose(digest: bytes, seed: int, vocab_size: int) -> int:
    """The id that follows a prefix: what model and sampler are in this world."""
    mixed = hashlib.blake2b(digest + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(mixed, "little") % vocab_size


def expected_ids(
    prompt: list[int], count: int, seed: int, vocab_size: int, end_ids: frozenset[int] = frozenset()
) -> list[int]:
    """What an undisturbed run of one request generates."""
    digest = EMPTY
    for token in prompt:
        digest = extend(digest, token)
    ids: list[int] = []
    while len(ids) < count:
        token = choose(digest, seed, vocab_size)
        ids.append(token)
        if token in end_ids:
            break
        digest = extend(digest, token)
    return ids


@dataclass
class _Row:
    seed: int
    ids: list[int]
    num_prompt: int
    slot: int  # of its counts
    digests: list[bytes] = field(default_factory=list)  # of the prefix that ends with ids[i]
    blocks: list[int] = field(default_factory=list)

    def digest(self, position: int) -> bytes:
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else EMPTY
            self.digests.append(extend(before, self.ids[len(self.digests)]))
        return self.digests[position]


def choose_allowed(digest: bytes, seed: int, mask: np.ndarray) -> int:
    """As `choose`, of the ids whose bits are set."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[choose(digest, seed, len(allowed))])


@dataclass
class _Ticket:
    plan: StepPlan
    constraint: Constraint | None = None
    has_chosen: bool = False  # as far as the host is concerned
    chosen: Chosen | None = None


class FakeDevice:
    """Implements tgi.server.engine.device.Device."""

    max_blocks = 1 << 20

    def __init__(self, block_size: int, *, lag: int = 0, depth: int = 1, vocab_size: int = 1000) -> None:
        self.depth = depth
        self.block_size = block_size
        self.lag = lag
        self.vocab_size = vocab_size
        self.slots: dict[int, bytes] = {}
        self.host_slots: dict[int, bytes] = {}
        self.num_offloaded = self.num_returned = 0  # blocks
        self.rows: dict[int, _Row] = {}
        self.poison: Callable[[Admit], bool] = lambda admit: False
        self.nan: Callable[[Admit], bool] = lambda admit: False
        self.breaks_choice: Callable[[Admit], bool] = lambda admit: False
        self._poisoned: set[int] = set()
        self._broken_choice: set[int] = set()
        self._nan_rows: set[int] = set()
        self._slots = Slots()
        self._slot_of: dict[int, int] = {}  # by row, as the host knows it
        self._counts: dict[int, Counter[int]] = {}  # by slot, as the device knows it
        self._work: deque[tuple[bool, Callable[[], None]]] = deque()  # (is a step, what to do)
        self.tokens_computed = 0
        self.largest_step = 0

    # --- Device ------------------------------------------------------------

    def check(self, admit: Admit) -> str | None:
        return None

    def apply(self, changes: RowChanges) -> None:
        # Launch-time faults are known to the host at once, whatever the device is still doing.
        for row in changes.removed:
            self._poisoned.discard(row)
            self._broken_choice.discard(row)
            self._slots.give_back(self._slot_of.pop(row))
        for row, admit in changes.added:
            self._slot_of[row] = self._slots.take()
            for rows, holds in ((self._poisoned, self.poison), (self._broken_choice, self.breaks_choice)):
                rows.discard(row)
                if holds(admit):
                    rows.add(row)
        added = [(row, self._slot_of[row], admit) for row, admit in changes.added]
        removed, blocks, moves = list(changes.removed), list(changes.blocks), changes.moves
        self._work.append((False, lambda: self._move(moves)))
        self._work.append((False, lambda: self._apply(removed, added, blocks)))

    def launch(self, plan: StepPlan) -> _Ticket:
        ticket = self.forward(plan)
        self.choose(ticket)
        return ticket

    def forward(self, plan: StepPlan) -> _Ticket:
        if self._poisoned.intersection(plan.rows.tolist()):
            raise RuntimeError("a poisoned request is in this step")
        return _Ticket(plan)

    def has_forwarded(self, launched: object) -> bool:
        return True

    def choose(self, launched: object, constraint: Constraint | None = None) -> None:
        assert isinstance(launched, _Ticket)
        if launched.has_chosen:
            raise Corrupt("a step chooses twice")
        if constraint is not None and self._broken_choice.intersection(launched.plan.rows.tolist()):
            raise RuntimeError("a choice of this step fails")
        launched.has_chosen, launched.constraint = True, constraint
        self._work.append((True, lambda: self._run(launched)))
        while sum(is_step for is_step, _ in self._work) > self.lag:
            self._work.popleft()[1]()

    def collect(self, launched: object) -> Chosen:
        assert isinstance(launched, _Ticket)
        while launched.chosen is None:
            self._work.popleft()[1]()
        return launched.chosen

    def idle(self) -> None:
        pass

    # --- what the device does, in order --------------------------------------

    def _move(self, moves: BlockMoves) -> None:
        columns = (np.frombuffer(column, np.uint32).tolist() for column in (moves.sources, moves.targets))
        for to_host, source, target in zip(moves.to_host, *columns, strict=True):
            here, there = (self.slots, self.host_slots) if to_host else (self.host_slots, self.slots)
            self.num_offloaded += to_host
            self.num_returned += not to_host
            for offset in range(self.block_size):
                found = here.get(source * self.block_size + offset)
                if found is None:
                    raise Corrupt(f"block {source} is copied, but nobody has written it")
                there[target * self.block_size + offset] = found

    def _apply(
        self, removed: list[int], added: list[tuple[int, int, Admit]], blocks: list[tuple[int, int, np.ndarray]]
    ) -> None:
        for row in removed:
            del self.rows[row]
            self._nan_rows.discard(row)
        for row, slot, admit in added:
            if row in self.rows:
                raise Corrupt(f"row {row} is given to a second request")
            ids = np.frombuffer(admit.prompt_ids + admit.generated_ids, np.uint32).tolist()
            self.rows[row] = _Row(admit.sampling.seed, ids, len(admit.prompt_ids) // 4, slot)
            self._counts[slot] = Counter(ids[self.rows[row].num_prompt :])
            if self.nan(admit):
                self._nan_rows.add(row)
        for row, first, numbers in blocks:
            table = self.rows[row].blocks
            if first != len(table):
                raise Corrupt(f"blocks of row {row} start at {first}, it has {len(table)}")
            if 0 in numbers:
                raise Corrupt("block 0 is scratch")
            table.extend(numbers.tolist())

    def _slot(self, row: _Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _scores(self, plan: StepPlan) -> PromptScores | None:
        """The logprob of the token at position p is -p / 8; the best are tokens 0, 1, …, each less by 1."""
        scoring = plan.scoring
        if scoring is None or not len(scoring.targets):
            return None
        first = zip(plan.starts.tolist(), scoring.counts.tolist())
        positions = np.concatenate([np.arange(start + 1, start + 1 + count) for start, count in first])
        tops = np.arange(scoring.top_n, dtype=np.int64)
        logprobs = (-positions / 8).astype(np.float32)
        return PromptScores(logprobs, np.tile(tops, (len(positions), 1)), logprobs[:, None] - tops.astype(np.float32))

    def _run(self, ticket: _Ticket) -> None:
        plan, constraint = ticket.plan, ticket.constraint
        takes = iter([True] * plan.num_rows if constraint is None else constraint.takes.tolist())
        masks = {} if constraint is None else dict(zip(constraint.masked.tolist(), constraint.masks))
        ids: list[int] = []
        nan: list[bool] = []
        given = iter(plan.ids.tolist())
        self.largest_step = max(self.largest_step, plan.num_tokens)
        self.tokens_computed += plan.num_tokens
        chosen_by_row: list[tuple[_Row, int, int]] = []
        for index, row_number in enumerate(plan.rows.tolist()):
            start, length = int(plan.starts[index]), int(plan.query_lens[index])
            tokens = [next(given) for _ in range(length)]
            chooses = bool(plan.samples[index]) and next(takes)
            row = self.rows.get(row_number)
            if row is None:  # ended on the host meanwhile: its result will be dropped
                if chooses:
                    ids.append(0)
                    nan.append(False)
                continue
            if not plan.from_device[index] and tokens != row.ids[start : start + length]:
                raise Corrupt(f"row {row_number} computes ids that are not its own at {start}")
            for position in range(start):
                if self.slots.get(self._slot(row, position)) != row.digest(position):
                    raise Corrupt(f"row {row_number} reads foreign KV at position {position} of {start}")
            for position in range(start, start + length):
                self.slots[self._slot(row, position)] = row.digest(position)
            if chooses:
                if self._counts[row.slot] != Counter(row.ids[row.num_prompt :]):
                    raise Corrupt(f"row {row_number} has counted other ids than its own")
                end = start + length
                mask = masks.get(len(ids))
                if mask is None:
                    token = choose(row.digest(end - 1), row.seed, self.vocab_size)
                else:
                    token = choose_allowed(row.digest(end - 1), row.seed, mask)
                ids.append(token)
                nan.append(row_number in self._nan_rows)
                chosen_by_row.append((row, end, token))
        # The commit: the step's last operation, and its only change to a row (rule 3).
        for row, end, token in chosen_by_row:
            if len(row.ids) != end:
                raise Corrupt("an id was chosen for a position that has one")
            row.ids.append(token)
            self._counts[row.slot][token] += 1
        count = len(ids)
        ticket.chosen = Chosen(
            ids=np.array(ids, np.int64),
            logprobs=np.full(count, -1.0, np.float32),
            is_nan=np.array(nan, np.bool_),
            prompt_scores=self._scores(plan),
        )
