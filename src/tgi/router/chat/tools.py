"""A request's tools and tool choice -> what the template shows of them, the grammar of a call that must come, and the
parser of the answer. Renders nothing; knows no tokens but the texts of special ones.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tgi.enums import ReasoningParser, ToolCallParser
from tgi.errors import InvalidRequest, ToolFailed
from tgi.router.chat import reasoning, tool_formats
from tgi.router.chat.answer import AnswerParser, make_answer_parser
from tgi.router.chat.lark import literal, spelled
from tgi.router.chat.messages import with_calls_as_text
from tgi.router.chat.reasoning import ReasoningFormat
from tgi.router.chat.tool_formats import JSON, Spelling, ToolFormat, detect_format
from tgi.router.schema.tools import FunctionDefinition, NamedTool, Tool, ToolChoice
from tgi.router.validation.grammar import GrammarWish, prepare_schema

MAX_CALLS = 16
"""In one answer that must call tools: a model that never stops calling would go on to its length."""

DEFAULT_TOOL_PROMPT = (
    "You may call the functions above. To call one, answer with nothing but a JSON object of the form "
    '{"name": "the function\'s name", "arguments": {"an argument\'s name": its value}}. '
    "Give every argument that the function requires, with real values. Where no function helps, answer in plain text."
)

MAX_TOOLS = 1024
"""In one request. OpenAI takes 128; each may need a grammar of its own."""

COMPOSING = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties", "propertyNames", "minProperties")
)
"""Keywords that may allow members besides those under `properties`."""

T = TypeVar("T")
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """What a model's chat template and vocabulary say about tools and thinking; read once, at start."""

    knows_tools: bool  # the template writes the variable `tools`
    format: ToolFormat | None  # None: calls are not looked for in answers that are free to be text
    reasoning: ReasoningFormat | None
    special_tokens: Mapping[str, int] = field(default_factory=dict, repr=False)  # text -> id
    calls_as_text: bool = False  # the template knows no tools, and never looks at the calls of a history


def read_tool_template(
    source: str | None,
    knows_tools: bool,
    special_tokens: Mapping[str, int],
    tool_call_parser: str = ToolCallParser.AUTO,
    reasoning_parser: str = ReasoningParser.AUTO,
) -> ToolTemplate:
    """`source`: the template that renders chats with tools. The parsers are words of the enums."""
    source = source or ""
    return ToolTemplate(
        knows_tools,
        _chosen(
            tool_call_parser,
            tool_formats.BY_NAME,
            # A template without tools teaches no format: the inserted text does.
            lambda: detect_format(source, special_tokens) if knows_tools else JSON,
        ),
        _chosen(
            reasoning_parser,
            reasoning.BY_NAME,
            lambda: reasoning.detect_reasoning(source, special_tokens),
        ),
        special_tokens,
        calls_as_text=bool(source) and not knows_tools and "tool_calls" not in source,
    )


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools mean for its prompt and its answer. Without tools: for the thinking text alone."""

    template_tools: list[dict[str, Any]] | None  # the variable `tools`
    grammar: GrammarWish | None  # where a call must come; to be given to `after_thinking`
    template: ToolTemplate
    format: ToolFormat | None = None  # in which calls are looked for
    schemas: Mapping[str, Schema] = field(default_factory=dict)  # of the parameters, by the tool's name
    insertion: str = ""  # behind the last message
    max_calls: int | None = None  # of one answer

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with what this plan has to say in them; those given are left alone."""
        if self.template.calls_as_text:
            messages = with_calls_as_text(messages)
        if not self.insertion:
            return messages
        for at in reversed(range(len(messages))):
            content = messages[at].get("content")
            # An assistant's last message is to be continued, one without text is calls only.
            if messages[at].get("role") != "assistant" and isinstance(content, str):
                return [*messages[:at], {**messages[at], "content": content + self.insertion}, *messages[at + 1 :]]
        return messages

    def parser_for_answer(self, prompt_tail: str, continued: str | None = None) -> AnswerParser | None:
        """A new parser for each answer; None where its text is content as it is. See `make_answer_parser`."""
        return make_answer_parser(
            self.format,
            self.template.reasoning,
            prompt_tail,
            self.schemas,
            continued=continued,
            max_calls=self.max_calls,
        )


def plan_tools(
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice | None,
    tool_prompt: str | None,
    parallel_tool_calls: bool | None,
    template: ToolTemplate,
) -> ToolPlan:
    """No tools, or the choice `none`, is an ordinary chat.

    Raises InvalidRequest for a tool or a choice that makes no sense, and where a call must come for a schema that
    cannot be enforced; ToolFailed for a named tool that is not there.
    """
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"`tools` supports up to {MAX_TOOLS} tools. Given: {len(tools)}", "tools")
    if not tools or tool_choice == "none":
        return ToolPlan(None, None, template)
    named = _named(tool_choice)
    chosen = [tool.function for tool in map(_checked, range(len(tools)), tools) if named in (None, tool.function.name)]
    if not chosen:
        raise ToolFailed(f"Tool with name {named} not found", "tool_choice")
    schemas = {function.name: _parameters(function) for function in chosen}
    must_call = named is not None or tool_choice == "required"
    several = named is None and parallel_tool_calls is not False
    shown = [_shown(function, schemas[function.name]) for function in chosen]
    format = template.format or (JSON if must_call else None)
    return ToolPlan(
        template_tools=shown if template.knows_tools else None,
        grammar=_grammar(format, schemas, several, template.special_tokens) if must_call and format else None,
        template=template,
        format=format,
        schemas=schemas,
        insertion=_insertion(shown, tool_prompt, template.knows_tools),
        max_calls=None if several else 1,
    )


def _chosen(name: str, by_name: Mapping[str, T], detect: Callable[[], T | None]) -> T | None:
    if name == "auto":
        return detect()
    return None if name == "none" else by_name[name]


def _named(choice: ToolChoice | None) -> str | None:
    """The one tool that must be called. TGI takes its name alone, too."""
    if isinstance(choice, NamedTool):
        if choice.type != "function":
            raise InvalidRequest(f"`tool_choice.type` must be `function`. Given: {choice.type}", "tool_choice")
        return choice.function.name
    return None if choice in (None, "auto", "required") else choice


def _checked(index: int, tool: Tool) -> Tool:
    if tool.type != "function":
        raise InvalidRequest(f"`tools[{index}].type` must be `function`. Given: {tool.type}", "tools")
    if not tool.function.name:
        raise InvalidRequest(f"`tools[{index}].function.name` must not be empty", "tools")
    return tool


def _parameters(function: FunctionDefinition) -> Schema:
    """The schema of a function's arguments; one that is not given takes none."""
    given = function.parameters if function.parameters is not None else function.arguments
    if given is None or given == "":
        return {"type": "object", "properties": {}}
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(given)
    if not isinstance(given, dict):
        raise InvalidRequest(f"`parameters` of the tool `{function.name}` must be a JSON schema, an object", "tools")
    return given


def _shown(function: FunctionDefinition, schema: Schema) -> dict[str, Any]:
    """A tool in OpenAI's shape, as templates write it."""
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    return {"type": "function", "function": {**shown, "parameters": schema}}


def _insertion(shown: list[dict[str, Any]], prompt: str | None, knows_tools: bool) -> str:
    """TGI's text behind the last message; where the template shows the tools itself, no more than the user's prompt."""
    if knows_tools:
        return f"\n---\n{prompt}" if prompt else ""
    return f"\n---\n{json.dumps(shown, ensure_ascii=False)}\n{prompt or DEFAULT_TOOL_PROMPT}"


def _grammar(
    format: ToolFormat, schemas: Mapping[str, Schema], several: bool, special_tokens: Mapping[str, int]
) -> GrammarWish:
    """One call or several, as the format spells them, with arguments that hold to their tool's schema."""
    spelling = format.spelling
    calls = [_call_rule(spelling, name, schema, special_tokens) for name, schema in schemas.items()]
    names = [f"tgi_call_{number}" for number in range(len(calls))]
    more = f"({spelled(spelling.between, special_tokens)} tgi_call){{0,{MAX_CALLS - 1}}}"
    before, after = (spelled(pieces, special_tokens) for pieces in (spelling.before, spelling.after))
    rules = [
        f"start: {before} tgi_call {more if several and spelling.takes_several else ''} {after}",
        f"tgi_call: {' | '.join(names)}",
        *(f"{name}: {call}" for name, call in zip(names, calls)),
    ]
    return GrammarWish("lark", "\n".join([*rules, ""]), "tools")


def _call_rule(spelling: Spelling, name: str, schema: Schema, special_tokens: Mapping[str, int]) -> str:
    arguments = prepare_schema(_arguments_schema(name, schema), "tools")
    if spelling.object_key:
        return f"%json {prepare_schema(_object_schema(name, spelling.object_key, json.loads(arguments)), 'tools')}"
    if not spelling.takes_name(name):
        raise InvalidRequest(f"the model's format of tool calls cannot spell the name `{name}`", "tools")
    names = {"name": name, "json_name": literal(name)}
    head, tail = (
        spelled([piece.format_map(names) for piece in pieces], special_tokens)
        for pieces in (spelling.head, spelling.tail)
    )
    return f"{head} %json {arguments} {tail}"


def _object_schema(name: str, key: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as one JSON object. Not text around the arguments: nothing but JSON can be an alternative to other JSON.

    `arguments`: as prepared, so that all references lead to its definitions.
    """
    definitions = arguments.pop("$defs", {})
    arguments.pop("x-guidance", None)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _arguments_schema(name: str, schema: Schema) -> dict[str, Any]:
    """Arguments are an object, and hold no members but those that the schema names, unless it says otherwise."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"`parameters` of the tool `{name}` must be of type `object`. Given: {kind}", "tools")
    is_open = COMPOSING & schema.keys() or _names_others(schema)
    closed = {} if is_open else {"additionalProperties": False}
    return {**closed, **schema, "type": "object"}


def _names_others(schema: Schema) -> bool:
    """Does it require members that it does not describe? What has no sense is for the schema's own check."""
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        return False
    return any(isinstance(name, str) and name not in properties for name in required)
