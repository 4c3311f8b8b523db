"""Log probabilities in OpenAI's two shapes: a list of objects in chats, columns in text completions.

A token is told by its own text and bytes, not by what became visible with it: a character's first parts show nothing, a
possible stop string is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from math import isfinite
from typing import Protocol

from tgi.router.backend import PromptToken, TokenEvent, TopToken
from tgi.router.schema.chat import TokenLogprob, TopLogprob
from tgi.router.schema.completions import CompletionLogprobs
from tgi.router.schema.numbers import shortest_f32

UNLIKELY = -9999.0
"""OpenAI's word for a probability that rounds to nothing; JSON has none for minus infinity."""


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


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
        self._place = _Place()
        self._columns = CompletionLogprobs([], [], [], [])

    def add_prompt(self, tokens: Sequence[PromptToken], text: str) -> None:
        """The tokens of an echoed prompt, whose text is `text`."""
        for token in tokens:
            raw = self._vocabulary.token_bytes(token.id)
            if not self._place.spells(raw, text):
                # What the tokenizer added takes no room: a BOS, or the blank that some put before the text.
                raw = raw[1:] if raw[:1] == b" " and self._place.spells(raw[1:], text) else b""
            self._add(token.id, token.logprob, token.top_tokens, self._place.begin(raw))
        self._place = _Place(len(text))

    def add(self, event: TokenEvent, shown: str) -> None:
        """`shown`: what the token adds to the text. Of a plain token the bytes count: what they show may come later."""
        raw = shown.encode() if event.special else self._vocabulary.token_bytes(event.token_id)
        self._add(event.token_id, event.logprob, event.top_tokens, self._place.begin(raw))

    def take(self) -> CompletionLogprobs:
        columns, self._columns = self._columns, CompletionLogprobs([], [], [], [])
        return columns

    def _add(self, token_id: int, logprob: float | None, alternatives: Sequence[TopToken], offset: int) -> None:
        columns, name = self._columns, self._name(token_id)
        number = None if logprob is None else _number(logprob)
        columns.tokens.append(name)
        columns.token_logprobs.append(number)
        columns.text_offset.append(offset)
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


class _Place:
    """How far a text has come, in characters: bytes that are no UTF-8 count as the U+FFFD that is shown for them."""

    def __init__(self, start: int = 0) -> None:
        self._decoder = _Utf8Decoder("replace")
        self._at = start  # behind the last character that is complete

    def begin(self, raw: bytes) -> int:
        """Where a token of these bytes begins: one that goes on with a character, where that character does."""
        begun, _ = self._decoder.getstate()
        breaks_off = begun and raw and raw[0] & 0xC0 != 0x80
        place = self._at + 1 if breaks_off else self._at
        self._at += len(self._decoder.decode(raw))
        return place

    def spells(self, raw: bytes, text: str) -> bool:
        """Does `text` go on with these bytes?"""
        state = self._decoder.getstate()
        shown = self._decoder.decode(raw)
        self._decoder.setstate(state)
        return text.startswith(shown, self._at)


def _number(logprob: float) -> float:
    spelled = shortest_f32(logprob) if isfinite(logprob) else None
    return UNLIKELY if spelled is None else max(spelled, UNLIKELY)
