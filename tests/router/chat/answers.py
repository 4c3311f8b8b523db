"""Answers for the tests of this folder: the same calls as each format writes them, and texts cut in every way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tgi.router.chat import tool_formats as formats
from tgi.router.chat.answer import AnswerParser, CallArguments, CallBegin, Content, Part, Reasoning, make_answer_parser
from tgi.router.chat.reasoning import ReasoningFormat
from tgi.router.chat.tool_formats import ToolFormat

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}

Call = tuple[str, dict[str, Any]]

PLAIN: Call = ("get_weather", {"city": "Oslo", "days": 3})
EMPTY: Call = ("now", {})
NESTED: Call = ("get_weather", {"city": "a", "tags": [{"b": {"c": [1, None]}}, [], {}, True, -1.5e3]})
HARD: Call = ("get_weather", {"city": 'q"uo\\te } ] { [ </tool_call> ``` [ARGS] \n<think> 東京 🌧'})
HUGE: Call = ("get_weather", {"city": "x{" * 3000, "tags": list(range(300))})
CALLS = {
    "plain": [PLAIN],
    "empty": [EMPTY],
    "nested": [NESTED],
    "hard": [HARD],
    "several": [PLAIN, EMPTY, HARD, NESTED],
}


def fixed_ids() -> Iterator[str]:
    return (str(number) for number in range(100))


def parser(
    format: ToolFormat | None, reasoning: ReasoningFormat | None = None, prompt_tail: str = "", continued: str = ""
) -> AnswerParser:
    made = make_answer_parser(format, reasoning, prompt_tail, TOOLS, fixed_ids().__next__, continued)
    assert made is not None
    return made


def merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one kind joined: what a client that joins the pieces ends up with."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, CallBegin) or type(last) is not type(part):
            result.append(part)
        elif isinstance(part, CallArguments):
            assert isinstance(last, CallArguments)
            assert last.index == part.index
            result[-1] = CallArguments(part.index, last.text + part.text)
        else:
            assert isinstance(last, Content | Reasoning)
            result[-1] = type(last)(last.text + part.text)
    return result


def feed(parser: AnswerParser, pieces: Sequence[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.push(piece, special=False)]
    return parts + parser.finish()


def parse(text: str, format: ToolFormat | None, reasoning: ReasoningFormat | None = None, **prompt: str) -> list[Part]:
    """The parts of an answer, the same however it is cut: whole, into characters, and in two at every position."""
    whole = merged(feed(parser(format, reasoning, **prompt), [text]))
    assert merged(feed(parser(format, reasoning, **prompt), list(text))) == whole
    for cut in range(1, len(text)):
        parts = merged(feed(parser(format, reasoning, **prompt), [text[:cut], text[cut:]]))
        assert parts == whole, f"cut at {cut}: {text[:cut]!r}"
    return whole


def calls_of(parts: Sequence[Part]) -> list[Call]:
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    assert [part.index for part in parts if isinstance(part, CallBegin)] == list(range(len(names)))
    arguments = ["" for _ in names]
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    return [(name, json.loads(text)) for name, text in zip(names, arguments)]


def content_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


@dataclass(frozen=True)
class Writer:
    """Writes calls as a family of models does, from what its template shows them."""

    name: str
    format: ToolFormat
    write: Any  # Sequence[Call] -> str

    def __str__(self) -> str:
        return self.name


def _objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]


def _arguments(call: Call) -> str:
    return json.dumps(call[1], ensure_ascii=False)


def _xml(calls: Sequence[Call]) -> str:
    texts: list[str] = []
    for name, arguments in calls:
        text = f"<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            value = value if isinstance(value, str) else json.dumps(value)
            text += f"<parameter={key}>\n{value}\n</parameter>\n"
        texts.append(text + "</function>\n</tool_call>")
    return "\n".join(texts)


def _python(calls: Sequence[Call]) -> str:
    lines = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return "```tool_code\n" + "\n".join(lines) + "\n```"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    begin, sep, end = "<｜tool▁call▁begin｜>function", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    texts = (f"{begin}{sep}{call[0]}\n```json\n{_arguments(call)}\n```{end}" for call in calls)
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    texts = (f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{_arguments(call)}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def _each(before: str, after: str, between: str = "\n", key: str = "arguments") -> Any:
    return lambda calls: between.join(f"{before}{text}{after}" for text in _objects(calls, key))


def _list(before: str, after: str, key: str = "arguments") -> Any:
    return lambda calls: f"{before}[{', '.join(_objects(calls, key))}]{after}"


def _flat(calls: Sequence[Call]) -> str:
    return "\n".join(json.dumps({"function": {"_name": name, **given}}, ensure_ascii=False) for name, given in calls)


WRITERS = (
    Writer("hermes", formats.HERMES, _each("<tool_call>\n", "\n</tool_call>")),
    Writer("hermes-tight", formats.HERMES, _each("<tool_call>", "</tool_call>", "")),
    Writer("smollm2-list", formats.HERMES, _list("<tool_call>", "</tool_call>")),
    Writer("granite", formats.GRANITE, _list("<|tool_call|>", "")),
    Writer("qwen3-coder", formats.QWEN3_CODER, _xml),
    Writer("qwen3-coder-json", formats.QWEN3_CODER, _each("<tool_call>\n", "\n</tool_call>")),
    Writer("llama3", formats.LLAMA3_JSON, _each("", "", "; ", "parameters")),
    Writer("llama3-tag", formats.LLAMA3_JSON, _each("<|python_tag|>", "", "", "parameters")),
    Writer("mistral", formats.MISTRAL, _list("[TOOL_CALLS] ", "")),
    Writer(
        "mistral-v11",
        formats.MISTRAL_V11,
        lambda calls: "".join(f"[TOOL_CALLS]{call[0]}[ARGS]{_arguments(call)}" for call in calls),
    ),
    Writer(
        "mistral-call-id",
        formats.MISTRAL,
        lambda calls: "".join(f"[TOOL_CALLS]{call[0]}[CALL_ID]abcdef123[ARGS]{_arguments(call)}" for call in calls),
    ),
    Writer("gemma-json", formats.GEMMA, _each("```tool_call\n", "\n```")),
    Writer("gemma-python", formats.GEMMA, _python),
    Writer("deepseek-v3", formats.DEEPSEEK_V3, _deepseek_v3),
    Writer("deepseek-v31", formats.DEEPSEEK_V31, _deepseek_v31),
    Writer("json", formats.JSON, _each("", "")),
    Writer("json-list", formats.JSON, _list("", "")),
    Writer("json-fence", formats.JSON, _each("```json\n", "\n```")),
    Writer("json-tag", formats.JSON, _each("<tool_call>\n", "\n</tool_call>")),
    Writer("json-old-tgi", formats.JSON, _flat),
)
