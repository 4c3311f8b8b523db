"""Log probabilities in OpenAI's two shapes: a list of objects in chats, columns in text completions.

A token is told by its own text and bytes, not by what became visible with it: a character's first parts show nothing, a
possible stop string is held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Protocol

from tgi.router.backend import PromptToken, TokenEvent, TopToken
from tgi.router.schema.chat import TokenLogprob, TopLogprob
from tgi.router.schema.completions import CompletionLogprobs
from tgi.router.schema.numbers import shortest_f32

UNLIKELY = -9999.0
"""OpenAI's word for a probability that rounds to nothing; JSON has none for minus infinity."""


class TokenBytes(Protocol):
    """The part of tgi.text.tokenizer.Tokenizer that is used here."""

    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


def chat_logprob(vocabulary: TokenBytes, event: TokenEvent, max_alternatives: int) -> TokenLogprob:
    """The shard may give more alternatives than were asked for: all that are as likely as the last."""
    return TokenLogprob(
        vocabulary.token_text(event.token_id),
        _number(event.logprob),
        list(vocabulary.token_bytes(event.token_id)),
        [
            TopLogprob(vocabulary.token_text(top.id), _number(top.logprob), list(vocabulary.token_bytes(top.id)))
            for top in event.top_tokens[:max_alternatives]
        ],
    )


class Columns:
    """Gathers the tokens of one text completion. `take` gives what came since it was last called."""

    def __init__(self, vocabulary: TokenBytes, max_alternatives: int) -> None:
        self._vocabulary = vocabulary
        self._max_alternatives = max_alternatives
        self._offset = 0  # characters of the choice's text that have begun
        self._columns = CompletionLogprobs([], [], [], [])

    def add_prompt(self, tokens: Sequence[PromptToken], text: str) -> None:
        """The tokens of an echoed prompt, whose text is `text`."""
        offsets = _places(text, [self._vocabulary.token_bytes(token.id) for token in tokens])
        for token, offset in zip(tokens, offsets, strict=True):
            self._add(token.id, token.logprob, token.top_tokens, offset)
        self._offset = len(text)

    def add(self, event: TokenEvent) -> None:
        raw = b"" if event.special else self._vocabulary.token_bytes(event.token_id)
        self._add(event.token_id, event.logprob, event.top_tokens, self._offset - _is_inside(raw))
        self._offset += _num_characters(raw)

    def take(self) -> CompletionLogprobs:
        columns, self._columns = self._columns, CompletionLogprobs([], [], [], [])
        return columns

    def _add(self, token_id: int, logprob: float | None, alternatives: Sequence[TopToken], offset: int) -> None:
        columns, name = self._columns, self._name(token_id)
        number = None if logprob is None else _number(logprob)
        columns.tokens.append(name)
        columns.token_logprobs.append(number)
        columns.text_offset.append(max(offset, 0))
        columns.top_logprobs.append(None if number is None else self._alternatives(alternatives, name, number))

    def _alternatives(self, alternatives: Sequence[TopToken], chosen: str, logprob: float) -> dict[str, float]:
        """The chosen token is always among them. Of two tokens with the same text the likelier one counts."""
        named: dict[str, float] = {}
        for top in alternatives[: self._max_alternatives]:
            named.setdefault(self._name(top.id), _number(top.logprob))
        named.setdefault(chosen, logprob)
        return named

    def _name(self, token_id: int) -> str:
        """The token's text; a part of a character as OpenAI spells it, so that different parts stay different."""
        raw = self._vocabulary.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _places(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Where each token begins in a text that they spell, in characters. One that was added, as a BOS, takes no room."""
    whole = text.encode()
    places: list[int] = []
    at = characters = 0
    for raw in tokens:
        place = characters - _is_inside(raw)
        if not whole.startswith(raw, at):
            # Some tokenizers put a blank before the text.
            raw = raw[1:] if raw[:1] == b" " and whole.startswith(raw[1:], at) else b""
        places.append(place)
        at += len(raw)
        characters += _num_characters(raw)
    return places


def _is_inside(raw: bytes) -> bool:
    """Do they go on with a character that an earlier token began?"""
    return raw[:1] != b"" and raw[0] & 0xC0 == 0x80


def _num_characters(raw: bytes) -> int:
    """Characters that begin in these bytes of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def _number(logprob: float) -> float:
    spelled = shortest_f32(logprob) if isfinite(logprob) else None
    return UNLIKELY if spelled is None else max(spelled, UNLIKELY)
