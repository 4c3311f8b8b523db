"""How families of models write tool calls: per format what begins a call, how it is read, and how one is to be written.

Which of them a model uses is read from its chat template, or said by the operator. Knows no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tgi.router.chat.json_calls import read_calls
from tgi.router.chat.python_calls import read_python_calls
from tgi.router.chat.reader import Reader, Reading

_NAME = re.compile(r"[\w.\-:/]*")  # where no quotes end it
_BRACKETS = re.compile(r"[\s}\]]*")
_FENCE_WORD = re.compile(r"[\w\-]*")


class ToolFormat(Protocol):
    """`call` spells one call around its arguments; several stand between `before` and `after`, joined by `between`.

    A piece of these that is the text of a special token stands for that token.
    """

    @property
    def name(self) -> str: ...
    @property
    def openers(self) -> tuple[str, ...]:
        """Where a call may begin."""
        ...

    @property
    def marks(self) -> frozenset[str]:
        """Texts that count as text even when they are special tokens."""
        ...

    @property
    def spelling(self) -> Spelling: ...

    def read(self, reader: Reader) -> Reading[None]: ...


@dataclass(frozen=True, slots=True)
class Spelling:
    """Pieces of text with {name} and {json_name} (quoted) in them."""

    head: tuple[str, ...] = ()  # of a call, up to its arguments
    tail: tuple[str, ...] = ()
    object_key: str = ""  # no head and tail, but one JSON object with the name and, under this key, the arguments
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    takes_several: bool = True

    def takes_name(self, name: str) -> bool:
        return "{name}" not in "".join(self.head) or _NAME.fullmatch(name) is not None


_OBJECT_HEAD = '{{"name": {json_name}, "arguments": '


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """JSON between two tags: Hermes, Qwen 2.5 and 3, SmolLM 2 and 3 (a list), Granite (no end tag)."""

    name: str
    opener: str
    closer: str

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.opener,)

    @property
    def marks(self) -> frozenset[str]:
        return frozenset({self.opener, self.closer} - {""})

    @property
    def spelling(self) -> Spelling:
        if not self.closer:
            return Spelling((_OBJECT_HEAD,), ("}}",), before=(self.opener, "["), after=("]",), between=(", ",))
        return Spelling((self.opener, "\n", _OBJECT_HEAD), ("}}", "\n", self.closer), between=("\n",))

    def read(self, reader: Reader) -> Reading[None]:
        yield from reader.take(self.opener)
        yield from reader.skip_space()
        yield from _read_json(reader, self.closer, bare=False)


@dataclass(frozen=True, slots=True)
class XmlParameters:
    """<function=NAME><parameter=KEY>VALUE</parameter></function>, within <tool_call> or without: Qwen3-Coder.

    Values are text; which become numbers, lists … the tool's schema says. Told to write a call, the model is held to
    JSON within the same tags, since no grammar can bind such text to a schema.
    """

    name: str = "qwen3_coder"
    openers: tuple[str, ...] = ("<tool_call>", "<function=")
    marks: frozenset[str] = frozenset({"<tool_call>", "</tool_call>"})

    @property
    def spelling(self) -> Spelling:
        return HERMES.spelling

    def read(self, reader: Reader) -> Reading[None]:
        is_tagged = yield from reader.take("<tool_call>")
        yield from reader.skip_space()
        closer = "</tool_call>" if is_tagged else ""
        if (yield from reader.peek()) == "{":
            yield from _read_json(reader, closer, bare=False)
        elif (yield from self._read_function(reader, is_tagged)):
            yield from _take_closer(reader, closer)

    def _read_function(self, reader: Reader, is_tagged: bool) -> Reading[bool]:
        if not (yield from reader.take("<function=")):
            return False
        name = yield from reader.run(_NAME)
        if not (yield from reader.take(">")) or not name or not (is_tagged or name in reader.tools):
            return False
        reader.begin(name)
        properties = (reader.tools.get(name) or {}).get("properties") or {}
        lead = "{"
        while True:
            yield from reader.skip_space()
            if (yield from reader.take("</function>")):
                reader.arguments("{}" if lead == "{" else "}")
                return True
            if not (yield from reader.take("<parameter=")):
                break
            key = yield from reader.run(_NAME)
            value = (yield from reader.until("</parameter>")) if (yield from reader.take(">")) else None
            if value is None:
                break
            reader.arguments(f"{lead}{_json(key)}: {_value_of(value, properties.get(key))}")
            lead = ", "
        if reader.ended:
            reader.drop_rest()
        else:
            reader.arguments("{}" if lead == "{" else "}")
        return False


@dataclass(frozen=True, slots=True)
class Mistral:
    """[TOOL_CALLS] and a list of objects, or (from version 11 of its tokenizer) [TOOL_CALLS]name[ARGS]{…}, repeated."""

    name: str = "mistral"
    lists: bool = True  # which of the two is written; both are read
    openers: tuple[str, ...] = ("[TOOL_CALLS]",)
    marks: frozenset[str] = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"})

    @property
    def spelling(self) -> Spelling:
        if self.lists:
            return Spelling((_OBJECT_HEAD,), ("}}",), before=("[TOOL_CALLS]", "["), after=("]",), between=(", ",))
        return Spelling(("[TOOL_CALLS]", "{name}", "[ARGS]"), ())

    def read(self, reader: Reader) -> Reading[None]:
        yield from reader.take("[TOOL_CALLS]")
        yield from reader.skip_space()
        if (yield from reader.peek()) in ("[", "{"):
            yield from read_calls(reader, bare=False)
            return
        name = yield from reader.run(_NAME)
        if (yield from reader.take("[CALL_ID]")):
            yield from reader.run(_NAME)
        yield from reader.take("[ARGS]")
        yield from reader.skip_space()
        if name and (yield from reader.peek()) == "{":
            reader.begin(name)
            yield from reader.json(reader.arguments)


@dataclass(frozen=True, slots=True)
class DeepSeek:
    """Calls between tokens of their own; version 3 writes the arguments in a fence, 3.1 does not. Both are read."""

    name: str = "deepseek_v3"
    fenced: bool = True
    openers: tuple[str, ...] = ("<｜tool▁calls▁begin｜>",)
    marks: frozenset[str] = frozenset(
        {
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        }
    )

    @property
    def spelling(self) -> Spelling:
        begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
        head = (begin, "function", sep, "{name}\n```json\n") if self.fenced else (begin, "{name}", sep)
        return Spelling(
            head,
            ("\n```", end) if self.fenced else (end,),
            before=("<｜tool▁calls▁begin｜>",),
            after=("<｜tool▁calls▁end｜>",),
            between=("\n",) if self.fenced else (),
        )

    def read(self, reader: Reader) -> Reading[None]:
        num_calls = reader.calls
        yield from reader.take("<｜tool▁calls▁begin｜>")
        yield from reader.skip_space()
        while (yield from reader.take("<｜tool▁call▁begin｜>")):
            if not (yield from self._read_call(reader)):
                return
            yield from reader.skip_space()
        if reader.calls > num_calls:
            yield from reader.take_end("<｜tool▁calls▁end｜>")

    def _read_call(self, reader: Reader) -> Reading[bool]:
        name = yield from reader.run(_NAME)
        if not (yield from reader.take("<｜tool▁sep｜>")):
            return False
        yield from reader.skip_space()
        is_fenced = (yield from reader.peek()) != "{"
        if is_fenced:
            name = yield from reader.run(_NAME)
            yield from reader.skip_space()
            yield from reader.take("```json")
            yield from reader.skip_space()
        if not name or (yield from reader.peek()) != "{":
            return False
        reader.begin(name)
        if not (yield from reader.json(reader.arguments)):
            return False
        yield from reader.skip_space()
        if is_fenced:
            yield from reader.take_end("```")
            yield from reader.skip_space()
        yield from reader.take_end("<｜tool▁call▁end｜>")
        return True


@dataclass(frozen=True, slots=True)
class BareJson:
    """JSON objects that name one of the request's tools, wherever they stand: Llama 3, and models that know no format.

    A fence, a tag or <|python_tag|> around them goes with them. `code_fence`: the one that may hold Python calls.
    """

    name: str
    spelling: Spelling
    code_fence: str = ""
    openers: tuple[str, ...] = ("{", "[", "```", "<tool_call>", "<|python_tag|>")
    marks: frozenset[str] = field(default=frozenset({"<tool_call>", "</tool_call>", "<|python_tag|>"}))

    def read(self, reader: Reader) -> Reading[None]:
        closer, word = "", ""
        if (yield from reader.take("```")):
            closer = "```"
            word = yield from reader.run(_FENCE_WORD)
        elif (yield from reader.take("<tool_call>")):
            closer = "</tool_call>"
        else:
            yield from reader.take("<|python_tag|>")
        yield from reader.skip_space()
        first = yield from reader.peek()
        is_code = word == self.code_fence != ""
        if first == "{" or (first == "[" and not is_code):
            yield from _read_json(reader, closer, bare=True)
        elif is_code:
            yield from self._read_code(reader)

    def _read_code(self, reader: Reader) -> Reading[None]:
        code = yield from reader.until("```")
        for name, arguments in read_python_calls(code or "", reader.tools) or ():
            reader.call(name, arguments)


HERMES = TaggedJson("hermes", "<tool_call>", "</tool_call>")
GRANITE = TaggedJson("granite", "<|tool_call|>", "")
QWEN3_CODER = XmlParameters()
MISTRAL = Mistral()
MISTRAL_V11 = Mistral("mistral_v11", lists=False)
DEEPSEEK_V3 = DeepSeek()
DEEPSEEK_V31 = DeepSeek("deepseek_v31", fenced=False)
# Llama's templates refuse a history with two calls in one message.
LLAMA3_JSON = BareJson("llama3_json", Spelling(object_key="parameters", takes_several=False))
GEMMA = BareJson(
    "gemma",
    Spelling(("```tool_call\n", _OBJECT_HEAD), ("}}\n```",), between=("\n",)),
    code_fence="tool_code",
)
JSON = BareJson("json", Spelling(object_key="arguments", between=("\n",)))

FORMATS: tuple[ToolFormat, ...] = (
    HERMES, QWEN3_CODER, LLAMA3_JSON, MISTRAL, MISTRAL_V11, GEMMA, GRANITE, DEEPSEEK_V3, DEEPSEEK_V31, JSON,
)  # fmt: skip
BY_NAME: dict[str, ToolFormat] = {format.name: format for format in FORMATS}


def detect_format(source: str, special_tokens: Mapping[str, Any]) -> ToolFormat:
    """The format that a chat template with tools teaches its model; JSON where it teaches none that we know."""
    if "<function=" in source:
        return QWEN3_CODER
    if "<tool_call>" in source:
        return HERMES
    if "[TOOL_CALLS]" in source or "[TOOL_CALLS]" in special_tokens:
        return MISTRAL_V11 if "[ARGS]" in source else MISTRAL
    if "<｜tool▁calls▁begin｜>" in source:
        return DEEPSEEK_V3 if "```json" in source else DEEPSEEK_V31
    if "<|tool_call|>" in source:
        return GRANITE
    if "tool_code" in source or "```tool_call" in source:
        return GEMMA
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and '"parameters"' in source):
        return LLAMA3_JSON
    return HERMES if "<tool_call>" in special_tokens else JSON


def _read_json(reader: Reader, closer: str, bare: bool) -> Reading[None]:
    num_calls = reader.calls
    yield from read_calls(reader, bare)
    if reader.calls > num_calls:
        yield from _take_closer(reader, closer)


def _take_closer(reader: Reader, closer: str) -> Reading[None]:
    """Take the mark behind a call, and with it brackets that a model closed once too often."""
    if not closer:
        return
    yield from reader.run(_BRACKETS)
    yield from reader.take_end(closer)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value_of(text: str, schema: Any) -> str:
    """The JSON of a parameter's text: as it is where it is JSON of a type that the schema allows, else a string."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, dict) else None
    try:
        kind = _kind_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return _json(text)
    allowed = (kinds,) if isinstance(kinds, str) else kinds
    if allowed is None or (kind != "string" and kind in allowed) or (kind == "integer" and "number" in allowed):
        return text.strip()
    return _json(text)


def _kind_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
