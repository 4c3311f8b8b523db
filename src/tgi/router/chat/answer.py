"""One answer's text -> thinking text, content and tool calls, as it comes. Streams and plain answers read from here.

Where the text is cut into pieces makes no difference to the parts, joined. Knows no tokens and no requests.
"""

from __future__ import annotations

import random

from tgi.router.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from tgi.router.chat.reader import IdMaker, PartList, Schemas
from tgi.router.chat.reasoning import Opening, ReasoningFormat, ReasoningParser, opening_of
from tgi.router.chat.tool_formats import ToolFormat
from tgi.router.chat.tool_parser import ToolParser

__all__ = [
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "Content",
    "Part",
    "Reasoning",
    "make_answer_parser",
    "make_call_id",
]


def make_call_id() -> str:
    """Nine digits, the first not 0.

    An id that all clients and templates take: `text-generation` parses it as an integer, Mistral's templates refuse any
    that has not nine letters or digits, and to OpenAI's clients it is any text.
    """
    return str(random.randrange(10**8, 10**9))


class AnswerParser:
    """One per answer, from `make_answer_parser`."""

    __slots__ = ("_marks", "_reasoning", "_tools")

    def __init__(self, tools: ToolParser | None, reasoning: ReasoningParser | None, marks: frozenset[str]) -> None:
        """`marks`: special tokens whose text counts; all others are no part of an answer."""
        self._tools = tools
        self._reasoning = reasoning
        self._marks = marks

    @property
    def has_calls(self) -> bool:
        """Has a call begun? Then the answer ends with the reason `tool_calls`, unless its length cut it."""
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, special: bool) -> list[Part]:
        if special and text not in self._marks:
            return []
        reasoning = self._reasoning
        if reasoning is None or (reasoning.passes and not special):
            return self._push_content(text)
        return self._with_calls(reasoning.push(text, special))

    def finish(self) -> list[Part]:
        """What was held back. Nothing may be pushed after it."""
        parts = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        if self._tools is not None:
            parts += self._tools.finish()
        return _joined(parts)

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        result: list[Part] = []
        for part in parts:
            result += self._push_content(part.text) if isinstance(part, Content) else [part]
        return result

    def _push_content(self, text: str) -> list[Part]:
        if self._tools is not None:
            return self._tools.push(text)
        return [Content(text)] if text else []


def make_answer_parser(
    format: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    prompt_tail: str,
    tools: Schemas,
    make_id: IdMaker = make_call_id,
    continued: str | None = None,
    max_calls: int | None = None,
) -> AnswerParser | None:
    """None where neither tools nor thinking are to be looked for: the text is content as it is.

    `format` None: the request has no tools. `tools`: the schema of each tool's parameters, by name. `prompt_tail` and
    `continued` are explained at `opening_of`. Calls beyond `max_calls` are dropped.
    """
    opening = Opening.ANSWER
    if reasoning is not None:
        opening = opening_of(reasoning, prompt_tail, continued)
        if opening is Opening.ANSWER and continued:
            reasoning = None  # in the midst of an answer no block begins
    if format is None and reasoning is None:
        return None
    return AnswerParser(
        ToolParser(format, tools, make_id, max_calls) if format else None,
        ReasoningParser(reasoning, opening) if reasoning else None,
        (format.marks if format else frozenset()) | (reasoning.marks if reasoning else frozenset()),
    )


def _joined(parts: list[Part]) -> list[Part]:
    joined = PartList()
    for part in parts:
        joined.add(part)
    return joined.take()
