"""The text of an answer as a tool-call format reads it: a cursor over what has come, and calls as they are recognised.

A format is a generator that yields where it needs more text. What it decides depends on the text alone, never on how
the text was cut. Knows no format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from tgi.router.chat.json_scan import JsonScanner
from tgi.router.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning

T = TypeVar("T")
Reading = Generator[None, None, T]
Schemas = Mapping[str, Mapping[str, Any]]  # a tool's name -> the JSON schema of its parameters
IdMaker = Callable[[], str]

MAX_SPACE = 64

_SPACE = re.compile(r"\s*")


class PartList:
    """Parts in order; neighbours of one kind become one."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def add(self, part: Part) -> None:
        last = self._parts[-1] if self._parts else None
        match last, part:
            case (Content(before), Content(text)):
                self._parts[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                self._parts[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                self._parts[-1] = CallArguments(index, before + text)
            case _:
                self._parts.append(part)

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class Reader:
    """What lies between `mark` and the cursor is not decided yet: it becomes content unless a call is recognised."""

    __slots__ = ("_dropped", "_make_id", "_mark", "_max_calls", "at", "calls", "ended", "parts", "text", "tools")

    def __init__(self, tools: Schemas, make_id: IdMaker, max_calls: int | None = None) -> None:
        """Calls beyond `max_calls` are read, but not told."""
        self.tools = tools
        self._make_id = make_id
        self._max_calls = max_calls
        self.parts = PartList()
        self.calls = 0  # begun so far
        self.ended = False
        self.text = ""
        self.at = 0  # the cursor
        self._dropped = 0  # characters before `text`
        self._mark = 0

    # For whoever owns the reader.

    def append(self, text: str) -> None:
        self.text = self.text[self._mark :] + text
        self.at -= self._mark
        self._dropped += self._mark
        self._mark = 0

    @property
    def position(self) -> int:
        """Characters of the answer before the cursor."""
        return self._dropped + self.at

    def take_undecided(self) -> str:
        """What nobody recognised up to the cursor: it is content, and the reader has done with it."""
        text = self.text[self._mark : self.at]
        self._mark = self.at
        return text

    # For formats.

    def commit(self) -> None:
        """All up to the cursor belongs to a call or to its marks."""
        self._mark = self.at

    def drop_rest(self) -> None:
        """The text was cut within a call: what is left of it is no content."""
        self.at = len(self.text)
        self.commit()

    def begin(self, name: str) -> None:
        self.commit()
        self.calls += 1
        self._tell(CallBegin(self.calls - 1, self._make_id(), name))

    def arguments(self, text: str) -> None:
        """A fragment of the arguments of the call begun last."""
        self.commit()
        self._tell(CallArguments(self.calls - 1, text))

    def call(self, name: str, arguments: str) -> None:
        self.begin(name)
        self.arguments(arguments)

    def _tell(self, part: CallBegin | CallArguments) -> None:
        if self._max_calls is None or part.index < self._max_calls:
            self.parts.add(part)

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Take the longest run of these characters."""
        taken: list[str] = []
        while True:
            found = characters.match(self.text, self.at)
            assert found is not None
            taken.append(found.group())
            self.at = found.end()
            if self.at < len(self.text) or self.ended:
                return "".join(taken)
            yield

    def skip_space(self) -> Reading[None]:
        yield from self.run(_SPACE)

    def take(self, literal: str) -> Reading[bool]:
        """Take `literal` if the text goes on with it."""
        while True:
            seen = self.text[self.at : self.at + len(literal)]
            if seen == literal:
                self.at += len(literal)
                return True
            if self.ended or not literal.startswith(seen):
                return False
            yield

    def take_end(self, mark: str) -> Reading[bool]:
        """Take the mark behind a call, or what there is of it where the text was cut: neither is content."""
        taken = yield from self.take(mark)
        if taken:
            self.commit()
        elif self.ended and mark.startswith(self.text[self.at :]):
            self.drop_rest()
            taken = True
        return taken

    def until(self, stop: str) -> Reading[str | None]:
        """Take all up to `stop`, and `stop` itself; None if the text ends before."""
        taken: list[str] = []
        while True:
            found = self.text.find(stop, self.at)
            if found >= 0:
                taken.append(self.text[self.at : found])
                self.at = found + len(stop)
                return "".join(taken)
            if self.ended:
                self.at = len(self.text)
                return None
            safe = len(self.text) - partial_suffix(self.text[self.at :], (stop,))
            taken.append(self.text[self.at : safe])
            self.at = safe
            yield

    def json(self, sink: Callable[[str], object] | None = None, opened: str = "") -> Reading[bool]:
        """Take a JSON value, giving its text to `sink` as it comes; False if it breaks off or is none.

        `opened`: text of the value that was taken already.
        """
        scanner = JsonScanner()
        scanner.feed(opened)
        while True:
            stop = scanner.feed(self.text, self.at)
            if stop > self.at:
                fragment = self.text[self.at : stop]
                self.at = stop
                if sink is not None:
                    sink(fragment)
            if scanner.complete or scanner.broken:
                return scanner.complete
            if self.ended:
                scanner.finish()
                return scanner.complete
            yield

    def string(self) -> Reading[str | None]:
        """Take a JSON string; its value, None if there is none."""
        if (yield from self.peek()) != '"':
            return None
        raw: list[str] = []
        if not (yield from self.json(raw.append)):
            return None
        try:
            return json.loads("".join(raw), strict=False)
        except ValueError:
            return None


def before_space(text: str) -> int:
    """Where the blanks at the end begin, which may belong to a mark that follows; at most MAX_SPACE of them."""
    return max(len(text.rstrip()), len(text) - MAX_SPACE)


def partial_suffix(text: str, literals: tuple[str, ...]) -> int:
    """How many of the last characters may be the beginning of one of `literals`."""
    longest = 0
    for literal in literals:
        for length in range(min(len(literal) - 1, len(text)), longest, -1):
            if text.endswith(literal[:length]):
                longest = length
                break
    return longest
