"""Pieces of llguidance's Lark dialect. Knows no tools and no requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

ANY_TEXT = "/(?s:.*)/"
BLANKS = r"/\s{0,4}/"

# What the name of a rule may stand in without meaning the rule: comments, texts, regular expressions.
_QUOTED = r'//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/'
_START = re.compile(rf"({_QUOTED})|(?<![\w\-])start(?![\w\-])")
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    return "/" + _SLASH.sub(lambda found: found[1] or "\\/", pattern).replace("\n", "\\n") + "/"


def renamed_start(grammar: str, name: str) -> str:
    """The grammar with its first rule called otherwise, to be part of another one."""
    return _START.sub(lambda found: found[1] or name, grammar)


def spelled(pieces: Iterable[str], special_tokens: Mapping[str, int]) -> str:
    """The pieces one behind the other: one that is a special token's text is that token, all others are text."""
    items: list[str] = []
    text = ""
    for piece in pieces:
        if piece not in special_tokens:
            text += piece
            continue
        if text:
            items.append(literal(text))
            text = ""
        items.append(f"<[{special_tokens[piece]}]>")
    if text:
        items.append(literal(text))
    return " ".join(items)
