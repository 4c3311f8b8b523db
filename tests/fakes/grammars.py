"""A grammar driven by itself, without a model: text that it allows, and whether it allows a text. One token a byte."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tgi.shard_client.messages import Grammar

EOS_ID = 256


class _Bytes:
    eos_token_id = EOS_ID
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
    special_token_ids = [EOS_ID]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def matcher_of(grammar: Grammar) -> LLMatcher:
    read = {
        "json_schema": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }[grammar.kind]
    matcher = LLMatcher(_vocabulary(), read(grammar.source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: Grammar, text: str) -> bool:
    """Is `text`, as a whole, allowed?"""
    matcher = matcher_of(grammar)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def begins(grammar: Grammar, text: str) -> bool:
    """May an allowed text begin with `text`? A last character that is cut is passed over."""
    matcher = matcher_of(grammar)
    ids = list(text.rstrip("\ufffd").encode())
    return matcher.try_consume_tokens(ids) == len(ids)


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def write(grammar: Grammar, rng: Random, max_tokens: int, hurry: float = 0.5) -> str | None:
    """A random text to its end, or None where `max_tokens` were not enough.

    `hurry`: how likely it is to close what can be closed, rather than to take any byte that is allowed.
    """
    matcher = matcher_of(grammar)
    written: list[int] = []
    while len(written) <= max_tokens:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token for token in range(EOS_ID + 1) if mask >> token & 1]
        assert allowed, f"nothing is allowed behind {bytes(written)!r}"
        closing = [token for token in allowed if token == EOS_ID or chr(token) in '"}]']
        token = rng.choice(closing if closing and rng.random() < hurry else allowed)
        if token == EOS_ID:
            return bytes(written).decode()
        assert matcher.consume_token(token)
        written.append(token)
        if matcher.is_stopped():
            return bytes(written).decode()
    return None
