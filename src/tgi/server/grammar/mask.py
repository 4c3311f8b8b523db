"""Which ids each row with a grammar may choose next: one bitmask per row, computed on threads beside the device's.

A row's state is a function of its grammar and its generated ids alone, so a resumed row is a replay. Work on a row is
one job at a time: it begins with the row, and again with each id that the host has collected; until it is done the row
has no mask. Nothing here waits unless asked to (`wait`). Knows no steps and no device.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from tgi.server.grammar.compiler import Compiler, GrammarError, one_line
from tgi.server.grammar.vocabulary import Vocabulary
from tgi.server.grammar.workers import Workers
from tgi.shard_client.messages import Admit, Grammar

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # for one job of a row, its waiting for a thread included
NUM_PATIENT = 2  # threads for what may take long
MAX_PARALLEL = 8  # threads for many masks at once
# A mask takes some 10 µs, and having several made at once 0.3 ms to begin with.
PARALLEL_ROWS = 32
# A row whose mask took longer once is left to the patient threads from then on: the others' masks do not wait for it.
SLOW_S = 0.002
REPLAY_IDS = 256  # at once: the library holds the interpreter meanwhile, about a microsecond per id

_WORD_BITS = 32
_ALL = np.int32(-1)


@dataclass(slots=True, eq=False)
class _Row:
    """One request's. The engine's thread makes it; the job at hand owns what stands above the lock's part."""

    grammar: Grammar
    ignore_eos: bool
    eos_ids: frozenset[int]
    position: int  # of the next id among the generated ones
    due: float  # time.monotonic() at which its job has taken too long
    matcher: LLMatcher | None = None
    is_slow: bool = False
    is_removed: bool = False
    # Under the lock: the mask or the error is the end of a job.
    mask: npt.NDArray[np.int32] | None = None
    error: str | None = None
    is_awaited: bool = False  # somebody wants to be woken

    @property
    def is_settled(self) -> bool:
        return self.mask is not None or self.error is not None


class Masks:
    """By the numbers of the engine's rows. Every method is for the thread that owns the engine, but `wait`."""

    def __init__(self, compiler: Compiler, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when a row that was awaited has its mask or its error."""
        self._compiler = compiler
        self._wake = wake
        self._rows: dict[int, _Row] = {}
        self._settled = threading.Condition()
        self._patient = Workers(NUM_PATIENT, "grammars")
        self._quick = Workers(1, "masks")
        self._executor = LLExecutor(max(1, min(MAX_PARALLEL, (os.cpu_count() or 1) // 2)))
        self._parallel = True

    # --- rows --------------------------------------------------------------

    def add(self, row: int, admit: Admit) -> None:
        """Compile the request's grammar and replay what it has generated. Its faults come by `faults`."""
        grammar = admit.grammar
        assert grammar is not None
        generated = np.frombuffer(admit.generated_ids, np.uint32)
        stopping = admit.stopping
        state = self._rows[row] = _Row(
            grammar, stopping.ignore_eos, frozenset(stopping.eos_ids), len(generated), time.monotonic() + PATIENCE_S
        )
        self._patient.submit(lambda: self._begin(state, generated[grammar.begins_at :]))

    def remove(self, row: int) -> None:
        """The row is free; what is still computed for it goes nowhere."""
        state = self._rows.pop(row, None)
        if state is not None:
            state.is_removed = True

    def advance(self, chosen: Sequence[tuple[int, int]]) -> None:
        """(row, id) of rows that go on: their next masks. Each had a mask, which allowed the id."""
        due = time.monotonic() + PATIENCE_S
        together: list[tuple[_Row, int]] = []
        for row, token in chosen:
            state = self._rows[row]
            assert state.is_settled
            state.mask, state.is_awaited, state.due = None, False, due
            if state.is_slow:
                self._patient.submit(lambda alone=(state, token): self._go_on([alone]))
            else:
                together.append((state, token))
        if together:
            self._quick.submit(lambda: self._go_on(together))

    def is_end(self, row: int, token: int) -> bool:
        """Is this id the end of the row's answer? Also where EOS is ignored: it is chosen when nothing else is left."""
        return token in self._rows[row].eos_ids

    def is_slow(self, row: int) -> bool:
        """Has a mask of this row once taken longer than a step should wait?"""
        return self._rows[row].is_slow

    # --- masks -------------------------------------------------------------

    def mask(self, row: int) -> npt.NDArray[np.int32] | None:
        """[ceil(vocab / 32)]: bit i % 32 of word i // 32 is set where id i may be chosen. None while it is computed."""
        return self._rows[row].mask

    def wait(self, rows: Sequence[int], timeout_s: float) -> bool:
        """Until all of them (those that are gone left out) have a mask or an error; False when time ran out. Any
        thread."""
        states = [state for row in rows if (state := self._rows.get(row)) is not None]
        with self._settled:
            return self._settled.wait_for(lambda: all(state.is_settled for state in states), timeout_s)

    def call_when_settled(self, row: int) -> None:
        """`wake` is called once the row has its mask or its error, unless it has already."""
        with self._settled:
            self._rows[row].is_awaited = True

    def faults(self) -> list[tuple[int, str]]:
        """(row, what is wrong) of every row that cannot go on; the caller removes them."""
        now = time.monotonic()
        found: list[tuple[int, str]] = []
        for row, state in self._rows.items():
            if state.error is not None:
                found.append((row, state.error))
            elif state.mask is None and state.due <= now:
                found.append((row, f"grammar ({_name(state.grammar)}) took longer than {PATIENCE_S:.0f} s"))
        return found

    @property
    def next_due_s(self) -> float:
        """Seconds until a row that is worked on will have taken too long."""
        due = min((state.due for state in self._rows.values() if state.mask is None), default=math.inf)
        return max(0.0, due - time.monotonic())

    # --- jobs --------------------------------------------------------------

    def _begin(self, state: _Row, generated: npt.NDArray[np.uint32]) -> None:
        try:
            if state.is_removed:
                return
            state.matcher = matcher = self._compiler.matcher(state.grammar)
            vocabulary = self._compiler.vocabulary()
            state.eos_ids = frozenset(token for token in state.eos_ids if token < vocabulary.size) | vocabulary.eos_ids
            for first in range(0, len(generated), REPLAY_IDS):
                if state.is_removed:
                    return
                if not matcher.consume_tokens(generated[first : first + REPLAY_IDS].tolist()):
                    raise GrammarError("grammar does not take what was generated so far")
            self._fill(vocabulary, [state])
        except BaseException as error:  # panics of the library are no Exceptions
            self._fail(state, error)

    def _go_on(self, chosen: Sequence[tuple[_Row, int]]) -> None:
        states = [state for state, token in chosen if not state.is_removed and self._take(state, token)]
        vocabulary = self._compiler.vocabulary()
        if len(states) >= PARALLEL_ROWS and self._parallel:
            self._fill(vocabulary, states)
            return
        for state in states:
            self._fill(vocabulary, [state])
        if len(states) >= PARALLEL_ROWS:
            self._parallel = True  # whoever was slow has been found

    def _take(self, state: _Row, token: int) -> bool:
        matcher = state.matcher
        assert matcher is not None
        state.position += 1
        try:
            if state.position <= state.grammar.begins_at or matcher.consume_token(token):
                return True
            self._fail(state, GrammarError(f"grammar cannot go on: {one_line(matcher.get_error())}"))
        except BaseException as error:  # else the job would end with it, and every row in it without a mask
            self._fail(state, error)
        return False

    def _fill(self, vocabulary: Vocabulary, states: Sequence[_Row]) -> None:
        """The masks of all these rows, computed side by side. What goes wrong is theirs."""
        words = -(-vocabulary.tokens.vocab_size // _WORD_BITS)
        masks = np.full((len(states), words), _ALL, np.int32)
        begun = [(state.matcher, i) for i, state in enumerate(states) if state.position >= state.grammar.begins_at]
        try:
            if len(begun) > 1:
                started = time.perf_counter()
                fill_next_token_bitmask_par(self._executor, begun, masks)  # type: ignore[arg-type]
                self._parallel = time.perf_counter() - started <= SLOW_S
            elif begun:
                started = time.thread_time()  # a busy machine makes no mask slow
                fill_next_token_bitmask(begun[0][0], masks, begun[0][1])  # type: ignore[arg-type]
                states[0].is_slow = states[0].is_slow or time.thread_time() - started > SLOW_S
        except BaseException as error:
            for state in states:
                self._fail(state, error)
            return
        for state, mask in zip(states, masks):
            self._finish(vocabulary, state, mask)

    def _finish(self, vocabulary: Vocabulary, state: _Row, mask: npt.NDArray[np.int32]) -> None:
        matcher = state.matcher
        assert matcher is not None
        if matcher.is_error():
            self._fail(state, GrammarError(f"grammar cannot go on: {one_line(matcher.get_error())}"))
            return
        mask = _of_model(mask, vocabulary.size)
        if state.position >= state.grammar.begins_at:
            _set(mask, state.eos_ids, _holds(mask, vocabulary.tokens.eos_token))
        if state.ignore_eos:
            mask = _without(mask, state.eos_ids)
        if not mask.any():
            self._fail(state, GrammarError("grammar leaves no token of the model's vocabulary"))
            return
        self._settle(state, mask, None)

    def _fail(self, state: _Row, error: BaseException) -> None:
        message = str(error)
        if not isinstance(error, GrammarError):
            log.exception("a grammar failed", exc_info=error)
            message = f"grammar failed: {one_line(f'{type(error).__name__}: {error}')}"
        self._settle(state, None, message)

    def _settle(self, state: _Row, mask: npt.NDArray[np.int32] | None, error: str | None) -> None:
        with self._settled:
            state.mask, state.error = mask, error
            is_awaited = state.is_awaited
            self._settled.notify_all()
        if is_awaited and not state.is_removed:
            self._wake()


def _of_model(mask: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.int32]:
    """The part for ids that the model has."""
    words = -(-vocab_size // _WORD_BITS)
    mask = mask[:words]
    rest = vocab_size % _WORD_BITS
    if rest:
        mask[-1] &= np.int32((1 << rest) - 1)
    return mask


def _holds(mask: npt.NDArray[np.int32], token: int) -> bool:
    return bool(int(mask[token // _WORD_BITS]) >> token % _WORD_BITS & 1)


def _set(mask: npt.NDArray[np.int32], tokens: frozenset[int], value: bool) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << token % _WORD_BITS)
        if value:
            words[token // _WORD_BITS] |= bit
        else:
            words[token // _WORD_BITS] &= ~bit


def _without(mask: npt.NDArray[np.int32], tokens: frozenset[int]) -> npt.NDArray[np.int32]:
    """These may not be chosen while anything else may."""
    others = mask.copy()
    _set(others, tokens, False)
    return others if others.any() else mask


def _name(grammar: Grammar) -> str:
    """Enough of it to tell which one it was."""
    source = " ".join(grammar.source.split())
    return f"{grammar.kind} {source[:40]}{'…' if len(source) > 40 else ''}"
