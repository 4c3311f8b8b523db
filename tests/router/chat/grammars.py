"""Random answers that a grammar allows, over one token per byte and the special tokens of a test."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

EOS = "<|end|>"
TIRED = 250
"""Tokens after which whatever ends something is chosen where it is allowed."""

MAX_TOKENS = 6000


class _Bytes:
    bos_token_id = None

    def __init__(self, special: tuple[str, ...]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [token.encode() for token in (EOS, *special)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = 256

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


class ByteVocabulary:
    """Ids 0 to 255 are bytes, 256 ends the text, `special` follow."""

    def __init__(self, *special: str) -> None:
        tokens = _Bytes(special)
        self._texts = tokens.tokens
        self._tokens = LLTokenizer(TokenizerWrapper(tokens), n_vocab=len(tokens.tokens))
        self.special_tokens = {text: 257 + number for number, text in enumerate(special)}
        self._closing = [*b'"}]`</', *self.special_tokens.values()]

    def matcher(self, lark: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, lark: str, text: str, special_tokens: Mapping[str, int] | None = None) -> bool:
        """Is `text`, its special tokens as such, a whole answer?"""
        matcher = self.matcher(lark)
        ids = self.encode(text, self.special_tokens if special_tokens is None else special_tokens)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def encode(self, text: str, special_tokens: Mapping[str, int]) -> list[int]:
        ids: list[int] = []
        while text:
            token = next((token for token in special_tokens if text.startswith(token)), None)
            ids += [special_tokens[token]] if token else text[0].encode()
            text = text[len(token or "x") :]
        return ids

    def random_answer(self, lark: str, random: Random) -> list[tuple[str, bool]]:
        """Pieces (text, is special) of an answer that the grammar let end."""
        matcher = self.matcher(lark)
        ids: list[int] = []
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(len(self._texts)) if mask[token // 8] >> token % 8 & 1]
            assert allowed, matcher.get_error()
            assert len(ids) < MAX_TOKENS, "the answer does not end"
            token = self._choice(allowed, len(ids), random)
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        return self._pieces(ids)

    def _choice(self, allowed: list[int], length: int, random: Random) -> int:
        if length > TIRED:
            ends = [token for token in (256, *self._closing) if token in allowed]
            if ends and random.random() < 0.9:
                return ends[0]
        return random.choice(allowed)

    def _pieces(self, ids: list[int]) -> list[tuple[str, bool]]:
        pieces: list[tuple[str, bool]] = []
        plain = bytearray()
        for token in [*ids, 256]:
            if token < 256:
                plain.append(token)
                continue
            if plain:
                pieces.append((plain.decode(), False))
                plain.clear()
            pieces.append((self._texts[token].decode(), True))
        return pieces
