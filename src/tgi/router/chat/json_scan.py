"""Finds where a JSON value ends in a text that arrives in pieces. Follows its structure, not its grammar.

Models write almost-JSON (`True`, a comma too many), and whoever gets the text may still make sense of it: only what
cannot stand in a JSON value at all breaks it.
"""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"[\w\s.+\-:,]*")  # between strings and brackets
_SCALAR = re.compile(r"[\w.+\-]*")
_STRING = re.compile(r'[^"\\]*')
_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """One per value; its time is linear in the text, its depth unlimited."""

    __slots__ = ("_closers", "_escaped", "_in_scalar", "_in_string", "broken", "complete")

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._in_scalar = False

    def feed(self, text: str, begin: int = 0) -> int:
        """Read from `begin`; where the value's part of `text` ends. Not to be called when complete or broken."""
        at, end = begin, len(text)
        while at < end and not (self.complete or self.broken):
            if self._in_string:
                at = self._string(text, at)
            elif self._closers:
                at = self._inside(text, _run(_OUTSIDE, text, at))
            else:
                at = self._top(text, at)
        return at

    def finish(self) -> None:
        """The text has ended: a number or a word at its end is complete."""
        self.complete = self.complete or self._in_scalar

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _run(_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.complete = not self._closers
        return at + 1

    def _inside(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif character == self._closers[-1]:
            self._closers.pop()
            self.complete = not self._closers
        else:
            self.broken = True
            return at
        return at + 1

    def _top(self, text: str, at: int) -> int:
        character = text[at]
        if not self._in_scalar and character == '"':
            self._in_string = True
            return at + 1
        if not self._in_scalar and character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
            return at + 1
        stop = _run(_SCALAR, text, at)
        self._in_scalar = self._in_scalar or stop > at
        self.broken = not self._in_scalar
        self.complete = self._in_scalar and stop < len(text)
        return stop


def _run(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
