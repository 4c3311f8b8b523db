"""The answer's text -> content and tool calls, as the text comes. The format is its caller's; sees no thinking text."""

from __future__ import annotations

import re
from typing import Protocol

from tgi.router.chat.parts import Content, Part
from tgi.router.chat.reader import IdMaker, Reader, Reading, Schemas, before_space, partial_suffix

_ENDED = object()


class ToolSyntax(Protocol):
    """How a model writes calls. `read` begins at one of the openers and takes at least that; what it does not commit
    is content.
    """

    @property
    def openers(self) -> tuple[str, ...]: ...

    def read(self, reader: Reader) -> Reading[None]: ...


class ToolParser:
    """One per answer. Text without any sign of a call goes through at the price of one search."""

    __slots__ = ("_after_call", "_opened_at", "_openers", "_reader", "_section", "_sign", "_syntax")

    def __init__(self, syntax: ToolSyntax, tools: Schemas, make_id: IdMaker, max_calls: int | None = None) -> None:
        self._syntax = syntax
        self._reader = Reader(tools, make_id, max_calls)
        self._section: Reading[None] | None = None
        self._opened_at = 0
        self._after_call = False  # blanks behind a call belong to its marks
        self._openers = re.compile("|".join(map(re.escape, syntax.openers)))
        firsts = "".join(sorted({opener[0] for opener in syntax.openers}))
        self._sign = re.compile(rf"[{re.escape(firsts)}]|\s\Z")

    @property
    def num_calls(self) -> int:
        return self._reader.calls

    def push(self, text: str) -> list[Part]:
        reader = self._reader
        is_plain = self._section is None and not self._after_call and reader.at == len(reader.text)
        if is_plain and not self._sign.search(text):
            return [Content(text)] if text else []
        reader.append(text)
        self._advance()
        return reader.parts.take()

    def finish(self) -> list[Part]:
        reader = self._reader
        reader.ended = True
        self._advance()
        reader.at = len(reader.text)
        self._give_content(reader.take_undecided())
        return reader.parts.take()

    def _advance(self) -> None:
        """Read until more text is needed."""
        while True:
            if self._section is None:
                if not self._find_opener():
                    return
                self._opened_at = self._reader.position
                self._section = self._syntax.read(self._reader)
            num_calls = self._reader.calls
            ended = next(self._section, _ENDED) is _ENDED
            self._after_call = self._after_call or self._reader.calls > num_calls
            if not ended:
                return
            self._section = None
            assert self._reader.position > self._opened_at, "a format takes its opener, or reading would never end"
            self._give_content(self._reader.take_undecided())

    def _find_opener(self) -> bool:
        """Give content up to the next opener, but for the blanks before it."""
        reader = self._reader
        text, at = reader.text, reader.at
        found = self._openers.search(text, at)
        end = found.start() if found else len(text) - partial_suffix(text[at:], self._syntax.openers)
        reader.at = at + before_space(text[at:end])
        self._give_content(reader.take_undecided())
        if found is None:
            return False
        reader.at = end
        return True

    def _give_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._reader.parts.add(Content(text))
