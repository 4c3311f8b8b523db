"""The tokens of a prompt with their logprobs, as a request's details show them. Made only when somebody looks at them.

A prompt may have many thousands: what hands it on while it handles a step has no time to make them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol, overload

from tgi.router.backend import PromptToken, TopToken


class TokenTexts(Protocol):
    """The part of tgi.text.tokenizer.Tokenizer that is used here."""

    def token_text(self, token_id: int) -> str: ...
    def is_special(self, token_id: int) -> bool: ...


class Tops(NamedTuple):
    """The best tokens of all positions, as many for each, one position behind the other."""

    ids: array[int]
    logprobs: array[float]


class PromptTokens(Sequence[PromptToken]):
    """`ids` and `logprobs` have one value per position, NaN where there is none: nothing comes before the first."""

    def __init__(self, ids: bytes, logprobs: array[float], tops: Tops | None, vocabulary: TokenTexts) -> None:
        self._ids = memoryview(ids).cast("I")
        self._logprobs = logprobs
        self._tops = tops
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> PromptToken: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptToken]: ...
    def __getitem__(self, index: int | slice) -> PromptToken | Sequence[PromptToken]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        token_id, logprob = self._ids[position], self._logprobs[position]
        return PromptToken(
            token_id,
            self._vocabulary.token_text(token_id),
            None if math.isnan(logprob) else logprob,
            () if self._tops is None else self._top_tokens(self._tops, position),
        )

    def _top_tokens(self, tops: Tops, position: int) -> tuple[TopToken, ...]:
        top_n = len(tops.ids) // len(self)
        where = slice(position * top_n, (position + 1) * top_n)
        text, is_special = self._vocabulary.token_text, self._vocabulary.is_special
        return tuple(
            TopToken(token_id, text(token_id), logprob, is_special(token_id))
            for token_id, logprob in zip(tops.ids[where], tops.logprobs[where])
            if logprob > -math.inf
        )
