"""Thinking text: which marks a model puts around it, telling it from the answer as text comes, and grammars that leave
it free. What a prompt leaves open counts, not what earlier turns said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tgi.router.chat.lark import ANY_TEXT, BLANKS, literal, regex, renamed_start, spelled
from tgi.router.chat.parts import Content, Part, Reasoning
from tgi.router.chat.reader import MAX_SPACE, before_space, partial_suffix
from tgi.router.validation.grammar import GrammarWish, prepare_schema


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    begin: str
    end: str

    @property
    def marks(self) -> frozenset[str]:
        return frozenset((self.begin, self.end))


THINK = ReasoningFormat("think", "<think>", "</think>")
FORMATS = (
    THINK,
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("magistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("reasoning", "<reasoning>", "</reasoning>"),
)
BY_NAME = {format.name: format for format in FORMATS}


class Opening(Enum):
    """How an answer begins."""

    THINKING = auto()  # the prompt opened the block
    EITHER = auto()  # the model may open it
    ANSWER = auto()  # the prompt closed the block, or is past it


def detect_reasoning(source: str, special_tokens: Mapping[str, Any]) -> ReasoningFormat | None:
    """The format whose marks the chat template or the vocabulary holds."""
    for format in FORMATS:
        if format.begin in source or format.end in source or format.begin in special_tokens:
            return format
    return None


def opening_of(format: ReasoningFormat, prompt_tail: str, continued: str | None = None) -> Opening:
    """`prompt_tail`: the rendered prompt or its end. `continued`: the assistant's text, at its end, that the answer
    goes on with.
    """
    if continued:
        opened = prompt_tail.removesuffix(continued).rstrip().endswith(format.begin)
        text = format.begin + continued if opened else continued
        return Opening.THINKING if text.rfind(format.begin) > text.rfind(format.end) else Opening.ANSWER
    tail = prompt_tail.rstrip()
    if tail.endswith(format.begin):
        return Opening.THINKING
    return Opening.ANSWER if tail.endswith(format.end) else Opening.EITHER


class ReasoningParser:
    """One per answer. A block counts at the answer's beginning; later only one that a special token opens, since an
    answer may speak about the marks. Blanks around the marks are theirs.
    """

    __slots__ = ("_after_mark", "_format", "_held", "_is_open", "_state")

    def __init__(self, format: ReasoningFormat, opening: Opening) -> None:
        self._format = format
        self._is_open = opening is Opening.THINKING
        self._state = _State.BEGIN
        self._held = ""
        self._after_mark = self._is_open  # blanks that come now are dropped

    @property
    def passes(self) -> bool:
        """Is whatever comes next, but for special tokens, content as it is?"""
        return self._state is _State.CONTENT and not self._after_mark

    def push(self, text: str, special: bool) -> list[Part]:
        if special and text in self._format.marks and self._state is _State.CONTENT:
            if text == self._format.begin:
                self._enter(_State.THINKING)
            return []
        parts: list[Part] = []
        text = self._held + text
        self._held = ""
        if self._state is _State.BEGIN:
            text = self._begin(text)
        if self._state is _State.THINKING:
            text = self._think(text, parts)
        if self._state is _State.CONTENT:
            self._give(Content, text, parts)
        return parts

    def finish(self) -> list[Part]:
        """What was held back because a mark might have followed."""
        parts: list[Part] = []
        is_thinking = self._state is _State.THINKING or (self._state is _State.BEGIN and self._is_open)
        held, self._held = self._held, ""
        self._give(Reasoning if is_thinking else Content, held, parts)
        return parts

    def _begin(self, text: str) -> str:
        """Decide how the answer begins; the text that is left to the new state."""
        body = text.lstrip()
        may_follow = len(text) - len(body) <= MAX_SPACE
        for mark, state in ((self._format.begin, _State.THINKING), (self._format.end, _State.CONTENT)):
            if may_follow and body.startswith(mark):
                self._enter(state)
                return body.removeprefix(mark)
        if may_follow and any(mark.startswith(body) for mark in self._format.marks):
            self._held = text
            return ""
        self._state = _State.THINKING if self._is_open else _State.CONTENT
        return text

    def _think(self, text: str, parts: list[Part]) -> str:
        """Give thinking text; what lies behind its end."""
        end = self._format.end
        found = text.find(end)
        stop = found if found >= 0 else len(text) - partial_suffix(text, (end,))
        safe = before_space(text[:stop])
        self._give(Reasoning, text[:safe], parts)
        if found < 0:
            self._held = text[safe:]
            return ""
        self._enter(_State.CONTENT)
        return text[found + len(end) :]

    def _enter(self, state: _State) -> None:
        self._state = state
        self._after_mark = True

    def _give(self, kind: type[Content] | type[Reasoning], text: str, parts: list[Part]) -> None:
        if self._after_mark:
            text = text.lstrip()
        if text:
            self._after_mark = False
            parts.append(kind(text))


class _State(Enum):
    BEGIN = auto()
    THINKING = auto()
    CONTENT = auto()


def after_thinking(
    wish: GrammarWish,
    format: ReasoningFormat | None,
    prompt_tail: str,
    special_tokens: Mapping[str, int],
    continued: str | None = None,
) -> GrammarWish:
    """The same constraint on what follows the thinking text, which is free. For the other arguments see `opening_of`.

    Raises InvalidRequest for a schema that cannot be enforced.
    """
    opening = Opening.ANSWER if format is None else opening_of(format, prompt_tail, continued)
    if format is None or opening is Opening.ANSWER:
        return wish
    begin, end = (spelled((mark,), special_tokens) for mark in (format.begin, format.end))
    if format.end in special_tokens:
        thought = f"tgi_thought: {ANY_TEXT} {end} {BLANKS}"
    else:
        thought = f"tgi_thought: tgi_thinking {BLANKS}\ntgi_thinking[suffix={end}]: {ANY_TEXT}"
    start = "tgi_thought" if opening is Opening.THINKING else f"({begin} tgi_thought)?"
    return GrammarWish("lark", f"start: {start} tgi_answer\n{thought}\n{as_rules(wish)}\n", wish.param)


def as_rules(wish: GrammarWish, name: str = "tgi_answer") -> str:
    """The wish as a rule of this name, and what it needs."""
    if wish.kind == "lark":
        return renamed_start(wish.value, name)
    if wish.kind == "regex":
        return f"{name}: {regex(wish.value)}"
    if wish.kind == "choice":
        return f"{name}: {' | '.join(map(literal, wish.value))}"
    schema = {"type": "object"} if wish.kind == "json_object" else wish.value
    return f"{name}: %json {prepare_schema(schema, wish.param)}"
