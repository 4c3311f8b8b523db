"""A grammar's source -> a matcher at its beginning. Compiled once, kept for those who ask again; any thread.

Knows no rows and no masks.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from tgi.errors import TgiError
from tgi.server.grammar.vocabulary import Vocabulary
from tgi.shard_client.messages import Grammar

CACHE_GRAMMARS = 256
CACHE_BYTES = 1 << 20  # of sources; what they compile to is up to 160 times as much (a schema of 5,000 patterns)
# What the source does not say itself. As TGI: at most one blank where JSON allows any.
JSON_DEFAULTS: dict[str, Any] = {"whitespace_pattern": r"[ ]?"}
MESSAGE_CHARACTERS = 300
DETAILS = re.compile(r"<state>|<non-verbose/>")  # behind it the library tells of its own insides

_WORD_BITS = 32


class GrammarError(TgiError):
    """A fault of one grammar, as its request's sender may read it."""


def limits() -> LLParserLimits:
    """What one grammar may cost. Hostile ones meet the first two as they are compiled, the others in some step: about
    100 MB and 20 ms at the worst."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        max_grammar_size=250_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


class Compiler:
    def __init__(
        self, vocabulary: Future[Vocabulary], cache_grammars: int = CACHE_GRAMMARS, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._vocabulary = vocabulary
        self._cache_grammars = cache_grammars
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        self._num_bytes = 0

    def vocabulary(self) -> Vocabulary:
        """Waits while it is read. Raises GrammarError where the model has none."""
        try:
            return self._vocabulary.result()
        except Exception as error:
            raise GrammarError(f"this model takes no grammars: {error}") from error

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """One that is the caller's own. Waits for whoever compiles the same already. Raises GrammarError."""
        key = (grammar.kind, grammar.source)
        ours: Future[LLMatcher] = Future()
        with self._lock:
            kept = self._cache.setdefault(key, ours)
            self._cache.move_to_end(key)
            if kept is ours:
                self._num_bytes += _num_bytes(key)
                self._trim()
        if kept is ours:
            try:
                ours.set_result(self._compile(grammar))
            except BaseException as error:
                ours.set_exception(error)
                with self._lock:
                    if self._cache.get(key) is ours:
                        self._forget(key)
        return kept.result().deep_copy()

    def _trim(self) -> None:
        while len(self._cache) > self._cache_grammars or self._num_bytes > self._cache_bytes:
            self._forget(next(iter(self._cache)))

    def _forget(self, key: tuple[str, str]) -> None:
        del self._cache[key]
        self._num_bytes -= _num_bytes(key)

    @property
    def cached(self) -> tuple[int, int]:
        """(grammars, bytes of their sources)"""
        return len(self._cache), self._num_bytes

    def _compile(self, grammar: Grammar) -> LLMatcher:
        tokens = self.vocabulary().tokens
        try:
            matcher = LLMatcher(tokens, _in_library_form(grammar), log_level=0, limits=limits())
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"grammar is not valid: {one_line(str(error))}") from error
        # What the first mask needs is learned once, for all copies.
        first = np.empty(-(-tokens.vocab_size // _WORD_BITS), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if matcher.is_error():
            raise GrammarError(f"grammar is not valid: {one_line(matcher.get_error())}")
        return matcher


def _in_library_form(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source, defaults=JSON_DEFAULTS)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)
    raise GrammarError(f"grammars of kind {grammar.kind!r} are not known; known are json_schema, regex and lark")


def one_line(reason: str) -> str:
    """Of what the library says at length."""
    return " ".join(DETAILS.split(reason)[0].split())[:MESSAGE_CHARACTERS]


def _num_bytes(key: tuple[str, str]) -> int:
    return sum(len(part.encode()) for part in key)
