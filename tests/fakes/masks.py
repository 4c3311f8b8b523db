"""Real masks that come late: as if the threads that make them were slow, but in turns instead of seconds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from tests.fakes.device import EMPTY, choose, choose_allowed, extend
from tgi.server.grammar.compiler import Compiler
from tgi.server.grammar.mask import Masks
from tgi.server.grammar.vocabulary import Vocabulary
from tgi.shard_client.messages import Admit, Grammar

LATENESS = (0, 0, 1, 3)
HANG_S = 20.0


def known(vocabulary: Vocabulary) -> Future[Vocabulary]:
    future: Future[Vocabulary] = Future()
    future.set_result(vocabulary)
    return future


class LateMasks(Masks):
    """Each mask is there after so many looks at it, drawn anew each time."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        seed: int = 0,
        lateness: Sequence[int] = LATENESS,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(Compiler(known(vocabulary)), wake)
        self._rng = random.Random(seed)
        self._lateness = lateness
        self._late: dict[int, int] = {}
        self.num_late = 0  # looks in vain

    def add(self, row: int, admit: Admit) -> None:
        self._late[row] = self._rng.choice(self._lateness)
        super().add(row, admit)

    def advance(self, chosen: Sequence[tuple[int, int]]) -> None:
        for row, _ in chosen:
            self._late[row] = self._rng.choice(self._lateness)
        super().advance(chosen)

    def wait(self, rows: Sequence[int], timeout_s: float) -> bool:
        assert super().wait(rows, HANG_S)
        return all(self._late[row] == 0 for row in rows)

    def mask(self, row: int) -> npt.NDArray[np.int32] | None:
        super().wait([row], HANG_S)
        if self._late[row]:
            self._late[row] -= 1
            self.num_late += 1
            return None
        return super().mask(row)


class GatedCompiler(Compiler):
    """Compiles nothing before `gate` is open."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(known(vocabulary))
        self.gate = threading.Event()
        self.entered = threading.Event()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        self.entered.set()
        assert self.gate.wait(HANG_S)
        return super().matcher(grammar)


def expected_under_grammar(
    vocabulary: Vocabulary,
    source: str,
    prompt: list[int],
    count: int,
    seed: int,
    begins_at: int = 0,
) -> list[int]:
    """What an undisturbed run on the fake device generates under a regular expression: by the library alone."""
    matcher = LLMatcher(vocabulary.tokens, LLMatcher.grammar_from_regex(source))
    digest = EMPTY
    for token in prompt:
        digest = extend(digest, token)
    ids: list[int] = []
    while len(ids) < count:
        if len(ids) < begins_at:
            token = choose(digest, seed, vocabulary.size)
        else:
            token = choose_allowed(digest, seed, np.frombuffer(matcher.compute_bitmask(), np.int32))
            assert matcher.consume_token(token)
        ids.append(token)
        if token in vocabulary.eos_ids:
            break
        digest = extend(digest, token)
    return ids
