"""The model's tokens as grammars see them: the router's own tokenizer, for llguidance. Knows no grammar and no row."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer

from tgi.errors import StartupError
from tgi.text.tokenizer import read_tokenizer

log = logging.getLogger(__name__)

# Ids of a table of weights beyond those of its tokenizer. The library takes memory for each, before anyone can see
# that the weights are others.
MOST_PADDING = 1 << 20


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: LLTokenizer
    size: int  # ids that the model can choose; the tokenizer may have more, and then they are out of reach
    eos_ids: frozenset[int]


def read_vocabulary(path: Path, size: int, eos_ids: Iterable[int] = ()) -> Vocabulary:
    """From a model directory or a .gguf file; takes a quarter of a second for 50,000 tokens.

    `eos_ids`: what the model's config adds to those of its tokenizer. Raises StartupError, one line, where the model
    has no tokenizer, none that llguidance can read, or no end.
    """
    source = read_tokenizer(path)
    ends = list(dict.fromkeys(token for token in (*source.eos_ids, *eos_ids) if token < size))
    if not ends:
        raise StartupError(f"{path} names no end-of-sequence token, so an answer could never leave its grammar")
    num_tokens = max(source.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > num_tokens + MOST_PADDING:
        raise StartupError(f"{path}: its configuration counts {size} tokens, its tokenizer has {num_tokens}")
    try:
        tokens = LLTokenizer(source.backend.to_str(), n_vocab=max(size, num_tokens), eos_token=ends)
    except Exception as error:  # the library raises bare exceptions
        raise StartupError(f"the tokenizer of {path} cannot be used for grammars: {error}") from error
    return Vocabulary(tokens, size, frozenset(ends))


def read_beside(path: Path, size: int, eos_ids: Iterable[int] = ()) -> Future[Vocabulary]:
    """The same on a thread of its own, so that a start does not wait for it. Its errors are the Future's."""
    future: Future[Vocabulary] = Future()

    def read() -> None:
        try:
            future.set_result(read_vocabulary(path, size, eos_ids))
        except BaseException as error:
            log.warning("Requests with a grammar will be refused: %s", error)
            future.set_exception(error)

    threading.Thread(target=read, name="vocabulary", daemon=True).start()
    return future
