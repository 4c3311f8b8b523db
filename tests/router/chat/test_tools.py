from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.router.chat.answers import CALLS, HARD, WRITERS, calls_of, content_of, merged, reasoning_of
from tests.router.chat.grammars import ByteVocabulary
from tgi.errors import InvalidRequest, ToolFailed
from tgi.router.chat import tool_formats as formats
from tgi.router.chat.answer import Content, Part, make_call_id
from tgi.router.chat.constraint import either
from tgi.router.chat.reasoning import THINK, ReasoningFormat, after_thinking
from tgi.router.chat.tool_formats import FORMATS, ToolFormat
from tgi.router.chat.tools import MAX_CALLS, MAX_TOOLS, ToolPlan, ToolTemplate, plan_tools, read_tool_template
from tgi.router.schema.tools import Tool, ToolChoice
from tgi.router.validation.grammar import GrammarWish

pytestmark = pytest.mark.row("B: tools, tool_choice, tool_prompt")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather "now" {of} a\nplace',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "place": {"$ref": "#/$defs/place"},
            },
            "required": ["city", "unit"],
            "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        },
    },
}
WEATHERS = {"type": "function", "function": {"name": "get_weathers", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now"}}

AWARE = ToolTemplate(True, formats.HERMES, None)
UNAWARE = ToolTemplate(False, formats.JSON, None)
USER = {"role": "user", "content": "Hi"}
EVERY_MARK = sorted({mark for format in FORMATS for mark in format.marks} | THINK.marks)

each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def tools_of(*tools: dict[str, Any]) -> list[Tool]:
    return msgspec.convert(list(tools), list[Tool])


def plan(
    *tools: dict[str, Any],
    choice: Any = None,
    prompt: str | None = None,
    parallel: bool | None = None,
    template: ToolTemplate = AWARE,
) -> ToolPlan:
    read = None if choice is None else msgspec.convert(choice, ToolChoice)
    return plan_tools(tools_of(*tools), read, prompt, parallel, template)


def answer_of(plan: ToolPlan, pieces: list[tuple[str, bool]], prompt_tail: str = "") -> list[Part]:
    parser = plan.parser_for_answer(prompt_tail)
    assert parser is not None
    return merged([part for text, special in pieces for part in parser.push(text, special)] + parser.finish())


def lark_of(plan: ToolPlan) -> str:
    assert plan.grammar is not None
    return plan.grammar.value


# What the template shows.


def test_tools_reach_the_template_in_openais_shape() -> None:
    shown = plan(WEATHER, NOW).template_tools
    assert shown is not None
    assert shown[0] == WEATHER
    assert shown[1]["function"] == {"name": "now", "parameters": {"type": "object", "properties": {}}}


def test_tgis_shape_is_read_too() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for given in (schema, json.dumps(schema)):
        shown = plan({"function": {"name": "f", "arguments": given}}).template_tools
        assert shown == [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def test_a_template_that_knows_tools_gets_no_text_but_the_users() -> None:
    assert plan(WEATHER).messages([USER]) == [USER]
    assert plan(WEATHER, prompt="Use them.").messages([USER])[0]["content"] == "Hi\n---\nUse them."


def test_a_template_without_tools_gets_them_behind_the_last_message() -> None:
    planned = plan(WEATHER, prompt="Use them.", template=UNAWARE)
    assert planned.template_tools is None
    messages = [{"role": "system", "content": "S"}, USER]
    text = planned.messages(messages)[-1]["content"]
    head, _, inserted = text.partition("\n---\n")
    tools, _, prompt = inserted.partition("\n")
    assert (head, json.loads(tools), prompt) == ("Hi", [WEATHER], "Use them.")
    assert messages == [{"role": "system", "content": "S"}, USER], "the caller's are left alone"
    for empty in (None, ""):
        text = plan(WEATHER, prompt=empty, template=UNAWARE).messages([USER])[0]["content"]
        assert '{"name": "the function\'s name", "arguments"' in text


def test_what_the_assistant_said_is_not_written_into() -> None:
    planned = plan(WEATHER, prompt="P", template=UNAWARE)
    calls = {"role": "assistant", "content": None, "tool_calls": [{}]}
    result = {"role": "tool", "content": "4", "tool_call_id": "1"}
    assert planned.messages([USER, calls, result])[-1]["content"].startswith("4\n---\n")
    written = planned.messages([USER, {"role": "assistant", "content": "It is"}])
    assert written[0]["content"].startswith("Hi\n---\n")
    assert written[1]["content"] == "It is"
    assert planned.messages([calls]) == [calls]


@pytest.mark.fault("TGI#2986")
@pytest.mark.parametrize(
    ("source", "knows_tools", "as_text"),
    [
        ("{{ messages[0].content }}", False, True),
        ("{{ messages[0].content }}{{ messages[0].tool_calls }}", False, False),
        ("{{ messages[0].content }}{{ tools }}", True, False),
        (None, False, False),
    ],
)
def test_a_template_that_never_looks_at_calls_gets_them_as_text(
    source: str | None, knows_tools: bool, as_text: bool
) -> None:
    """With tools or without: a history stays one when its tools are no longer offered."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = read_tool_template(source, knows_tools, {})
    for planned in (plan_tools(None, None, None, None, template), plan(NOW, template=template)):
        (message,) = planned.messages([said])
        assert message["content"] == ('{"name": "now", "arguments": {}}' if as_text else None)


# What is chosen.


@pytest.mark.parametrize("choice", [None, "auto", "required", "now", {"type": "function", "function": {"name": "x"}}])
def test_no_tools_is_an_ordinary_chat_whatever_the_choice(choice: Any) -> None:
    for tools in (None, []):
        planned = plan_tools(tools, msgspec.convert(choice, ToolChoice | None), "P", None, UNAWARE)
        assert (planned.template_tools, planned.grammar) == (None, None)
        assert planned.messages([USER]) == [USER]
        assert planned.parser_for_answer("") is None


@pytest.mark.parametrize("choice", [None, "none", "required"])
def test_too_many_tools_are_refused(choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(MAX_TOOLS + 1)]
    with pytest.raises(InvalidRequest, match=f"up to {MAX_TOOLS} tools. Given: {MAX_TOOLS + 1}"):
        plan(*tools, choice=choice)
    assert plan(*tools[1:]).schemas.keys() == {f"f{index}" for index in range(1, MAX_TOOLS + 1)}


def test_none_is_an_ordinary_chat() -> None:
    planned = plan(WEATHER, choice="none")
    assert (planned.template_tools, planned.grammar) == (None, None)
    assert planned.parser_for_answer("") is None


def test_without_tools_thinking_text_is_parsed_all_the_same() -> None:
    planned = plan_tools(None, None, None, None, ToolTemplate(True, formats.HERMES, THINK))
    parts = answer_of(planned, [("Hm.</think>\n<tool_call>", False)], "<think>\n")
    assert (reasoning_of(parts), content_of(parts)) == ("Hm.", "<tool_call>")


@pytest.mark.parametrize("choice", [None, "auto"])
def test_auto_leaves_the_answer_free(choice: str | None) -> None:
    planned = plan(WEATHER, choice=choice)
    assert planned.grammar is None
    assert answer_of(planned, [("Just text.", False)]) == [Content("Just text.")]


@each_format
def test_one_call_at_most_where_no_more_are_wanted(format: ToolFormat) -> None:
    writer = next(writer for writer in WRITERS if writer.format is format)
    planned = plan(WEATHER, NOW, parallel=False, template=ToolTemplate(True, format, None))
    text = writer.write([("now", {}), ("now", {}), ("get_weather", {"city": "a"})])
    parts = answer_of(planned, [(f"a {text} b", False)])
    assert calls_of(parts) == [("now", {})]
    assert content_of(parts) == "ab"


@pytest.mark.parametrize(
    "choice", ["now", {"type": "function", "function": {"name": "now"}}, {"function": {"name": "now"}}]
)
def test_a_named_tool_is_the_only_one(choice: Any) -> None:
    planned = plan(WEATHER, NOW, choice=choice)
    assert planned.template_tools is not None
    assert [tool["function"]["name"] for tool in planned.template_tools] == ["now"]
    assert "get_weather" not in lark_of(planned)


@pytest.mark.parametrize("choice", ["nope", {"type": "function", "function": {"name": "nope"}}])
def test_a_name_that_is_not_there(choice: Any) -> None:
    with pytest.raises(ToolFailed, match=r"^Tool with name nope not found$") as caught:
        plan(WEATHER, choice=choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ({"type": "web_search", "function": {"name": "x"}}, r"`tools\[0\].type` must be `function`. Given: web_search"),
        ({"function": {"name": ""}}, r"`tools\[0\].function.name` must not be empty"),
        ({"function": {"name": "x", "parameters": 3}}, "`parameters` of the tool `x` must be a JSON schema"),
        ({"function": {"name": "x", "parameters": "no json"}}, "`parameters` of the tool `x` must be a JSON schema"),
    ],
)
def test_tools_that_make_no_sense(tool: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        plan(tool)


def test_a_choice_of_another_type() -> None:
    with pytest.raises(InvalidRequest, match=r"`tool_choice\.type` must be `function`. Given: custom"):
        plan(WEATHER, choice={"type": "custom", "function": {"name": "now"}})


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "not"),
        ({"type": "array"}, "must be of type `object`. Given: array"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_where_it_must_be(schema: dict[str, Any], told: str) -> None:
    tool = {"function": {"name": "f", "parameters": schema}}
    assert plan(tool).grammar is None
    with pytest.raises(InvalidRequest, match=told) as caught:
        plan(tool, choice="required")
    assert caught.value.param == "tools"


# What must come.


@each_format
@pytest.mark.parametrize("are_special", [True, False], ids=["special", "text"])
@pytest.mark.fault("vllm#16880", "vllm#9209")
def test_a_required_call_is_called(format: ToolFormat, are_special: bool) -> None:
    """Random answers that the grammar allows are read back as calls that their schemas allow, and nothing else."""
    vocabulary = ByteVocabulary(*(EVERY_MARK if are_special else ()))
    planned = plan(
        WEATHER, WEATHERS, NOW, choice="required", template=ToolTemplate(True, format, None, vocabulary.special_tokens)
    )
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in (WEATHER, WEATHERS, NOW)}
    counts = set()
    for seed in range(6):
        pieces = vocabulary.random_answer(lark_of(planned), Random(seed))
        parts = answer_of(planned, pieces)
        calls = calls_of(parts)
        assert 1 <= len(calls) <= MAX_CALLS
        assert content_of(parts) == ""
        for name, arguments in calls:
            jsonschema.validate(arguments, schemas[name])
        counts.add(len(calls))
    assert max(counts) > 1 or not format.spelling.takes_several


@each_format
@pytest.mark.parametrize("given", [{"choice": "required", "parallel": False}, {"choice": "get_weather"}])
def test_one_call_where_one_is_asked_for(format: ToolFormat, given: dict[str, Any]) -> None:
    vocabulary = ByteVocabulary()
    planned = plan(WEATHER, NOW, template=ToolTemplate(True, format, None), **given)
    for seed in range(4):
        calls = calls_of(answer_of(planned, vocabulary.random_answer(lark_of(planned), Random(seed))))
        assert len(calls) == 1
        assert given["choice"] == "required" or calls[0][0] == "get_weather"


@each_format
def test_a_schema_that_refers_to_itself(format: ToolFormat) -> None:
    schema = {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "child": {"$ref": "#"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    tool = {"function": {"name": "tree", "parameters": schema}}
    planned = plan(tool, choice="required", parallel=False, template=ToolTemplate(True, format, None))
    for seed in range(4):
        calls = calls_of(answer_of(planned, ByteVocabulary().random_answer(lark_of(planned), Random(seed))))
        jsonschema.validate(calls[0][1], schema)


@each_format
def test_calls_may_be_one_of_two_things_that_an_answer_can_be(format: ToolFormat) -> None:
    """As when the answer is else bound to a schema: neither hides the other."""
    planned = plan(NOW, choice="required", template=ToolTemplate(True, format, None))
    shape = GrammarWish("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}, "p")
    lark = either(shape, planned.grammar or shape).value
    vocabulary = ByteVocabulary()
    call = "".join(text for text, special in vocabulary.random_answer(lark_of(planned), Random(0)) if not special)
    assert vocabulary.accepts(lark, call)
    assert vocabulary.accepts(lark, '{"a": 1}')


def test_a_function_without_parameters_takes_none() -> None:
    planned = plan(NOW, choice="now")
    vocabulary = ByteVocabulary()
    answer = '<tool_call>\n{"name": "now", "arguments": %s}\n</tool_call>'
    assert vocabulary.accepts(lark_of(planned), answer % "{}")
    assert not vocabulary.accepts(lark_of(planned), answer % '{"a": 1}')


def test_members_that_a_schema_names_are_all_there_are_unless_it_says_otherwise() -> None:
    vocabulary = ByteVocabulary()
    answer = '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>'
    for schema, takes in (
        ({"properties": {"a": {}}}, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, True),
        ({"allOf": [{"properties": {"b": {}}}]}, True),
        ({"type": ["object", "null"], "properties": {"b": {}}}, True),
        ({"properties": {"a": {}}, "required": ["b"]}, True),
        ({"type": "object", "minProperties": 1}, True),
        ({"propertyNames": {"enum": ["b"]}}, True),
    ):
        planned = plan({"function": {"name": "f", "parameters": schema}}, choice="required")
        assert vocabulary.accepts(lark_of(planned), answer) == takes, schema


@pytest.mark.parametrize(
    "schema", [{"properties": 5, "required": ["a"]}, {"required": 5}, {"required": [["a"]]}, {"minProperties": "1"}]
)
def test_parameters_that_make_no_sense_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"`{'|'.join(schema)}`"):
        plan({"function": {"name": "f", "parameters": schema}}, choice="required")


@pytest.mark.parametrize("name", ['we"ird\\ {name}', "naïve 東京", "a.b/c:d-e"])
def test_names_of_any_kind_are_spelled_as_they_are(name: str) -> None:
    for format in (formats.HERMES, formats.JSON, formats.MISTRAL):
        planned = plan({"function": {"name": name}}, choice="required", template=ToolTemplate(True, format, None))
        calls = calls_of(answer_of(planned, ByteVocabulary().random_answer(lark_of(planned), Random(0))))
        assert {called for called, _ in calls} == {name}


def test_a_name_that_the_format_cannot_spell_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot spell the name `two words`"):
        plan(
            {"function": {"name": "two words"}},
            choice="required",
            template=ToolTemplate(True, formats.MISTRAL_V11, None),
        )


def test_with_the_parser_off_a_required_call_still_is_one() -> None:
    template = ToolTemplate(True, None, None)
    assert plan(NOW, template=template).parser_for_answer("") is None
    planned = plan(NOW, choice="required", template=template)
    assert calls_of(answer_of(planned, [('{"name": "now", "arguments": {}}', False)])) == [("now", {})]


# Behind the thinking text.

BEGUN = "assistant\n<think>\n"
WISHES = {
    "json_schema": (GrammarWish("json_schema", {"type": "object", "properties": {"a": {}}}, "p"), '{"a":1}', '{"a":'),
    "json_object": (GrammarWish("json_object", None, "p"), '{"x": []}', "[]"),
    "regex": (GrammarWish("regex", r"a/b\/c|\d+\n", "p"), "a/b/c", "a/b"),
    "choice": (GrammarWish("choice", ("yes", 'no "way"'), "p"), 'no "way"', "maybe"),
    "lark": (
        GrammarWish("lark", 'start: "start" /[st\\/]+/ end // start\nend: "!" restart?\nrestart: "?" start', "p"),
        "starts/t!?startt!",
        "start",
    ),
}


@pytest.mark.parametrize("are_special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize(("wish", "good", "bad"), WISHES.values(), ids=list(WISHES))
@pytest.mark.fault("vllm#14113")
def test_the_constraint_begins_behind_the_thinking_text(
    wish: GrammarWish, good: str, bad: str, are_special: bool
) -> None:
    vocabulary = ByteVocabulary(*(THINK.marks if are_special else ()))

    def accepts(tail: str, answer: str) -> bool:
        wrapped = after_thinking(wish, THINK, tail, vocabulary.special_tokens)
        assert (wrapped.kind, wrapped.param) == ("lark", "p")
        return vocabulary.accepts(wrapped.value, answer)

    for thought in ("", "{[ 東京 < </thin > nothing of it \n\n fits"):
        assert accepts(BEGUN, f"{thought}</think>\n\n{good}")
        assert accepts(BEGUN, f"{thought}</think>{good}")
        assert not accepts(BEGUN, f"{thought}</think>\n\n{bad}")
        assert accepts("assistant\n", f"<think>{thought}</think>\n\n{good}")
        assert not accepts("assistant\n", f"<think>{thought}</think>\n\n{bad}")
    assert not accepts(BEGUN, good), "the block is open"
    assert accepts("assistant\n", good), "the model need not think"
    assert not accepts("assistant\n", bad)
    assert not accepts("assistant\n", f"thought without a mark {good}")


@pytest.mark.parametrize("reasoning", [None, THINK])
def test_a_grammar_without_thinking_is_left_alone(reasoning: ReasoningFormat | None) -> None:
    wish = GrammarWish("regex", "a+", "p")
    assert after_thinking(wish, reasoning, "<think>\n\n</think>\n\n", {}) is wish


@pytest.mark.parametrize("tail", [BEGUN, "assistant\n"])
@pytest.mark.fault("vllm#14113")
def test_a_required_call_may_be_thought_about(tail: str) -> None:
    vocabulary = ByteVocabulary("<think>", "</think>", "<tool_call>", "</tool_call>")
    planned = plan(
        NOW, choice="required", template=ToolTemplate(True, formats.HERMES, THINK, vocabulary.special_tokens)
    )
    assert planned.grammar is not None
    wish = after_thinking(planned.grammar, THINK, tail, vocabulary.special_tokens)
    for seed in range(4):
        parts = answer_of(planned, vocabulary.random_answer(wish.value, Random(seed)), tail)
        assert {name for name, _ in calls_of(parts)} == {"now"}
        assert content_of(parts) == ""


# How answers come in pieces.


@each_format
def test_special_tokens_count_where_they_are_marks(format: ToolFormat) -> None:
    """The same answer, its marks once as text and once as special tokens among others."""
    writer = next(writer for writer in WRITERS if writer.format is format)
    calls = [call for call in CALLS["several"] if call is not HARD]
    text = writer.write(calls)
    pieces: list[tuple[str, bool]] = [("<s>", True)]
    while text:
        mark = next((mark for mark in format.marks if text.startswith(mark)), "")
        pieces.append((mark or text[0], bool(mark)))
        text = text[len(mark or "x") :]
    planned = plan(WEATHER, NOW, template=ToolTemplate(True, format, None))
    parts = answer_of(planned, [*pieces, ("<|im_end|>", True)])
    assert calls_of(parts) == calls
    assert content_of(parts) == ""


@pytest.mark.fault("TGI#2794", "vllm#44098")
def test_id_and_name_come_once_before_the_arguments() -> None:
    parser = plan(NOW).parser_for_answer("")
    assert parser is not None
    text = '<tool_call>\n{"name": "now", "arguments": {"a": [1, 2]}}\n</tool_call>'
    parts = [part for character in text for part in parser.push(character, False)]
    assert not parser.finish()
    kinds = [type(part).__name__ for part in parts]
    assert kinds == ["CallBegin"] + ["CallArguments"] * (len(kinds) - 1)
    assert len(kinds) > 5, "arguments stream"
    assert parser.has_calls


def test_ids_suit_every_client() -> None:
    ids = {make_call_id() for _ in range(1000)}
    assert len(ids) > 990
    assert all(len(call_id) == 9 and call_id == str(int(call_id)) for call_id in ids)


def test_every_answer_has_a_parser_and_ids_of_its_own() -> None:
    planned = plan(NOW)
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    first, second = answer_of(planned, [(text, False)]), answer_of(planned, [(text, False)])
    assert first != second
    assert calls_of(first) == calls_of(second)


# What the model is.


def test_the_template_is_read_once_for_all() -> None:
    source = "{{ tools }}<tool_call>{{ '</think>' }}"
    read = read_tool_template(source, True, {"</s>": 2})
    assert (read.knows_tools, read.format, read.reasoning) == (True, formats.HERMES, THINK)
    assert read_tool_template(source, False, {}).format is formats.JSON
    assert read_tool_template(None, False, {}) == ToolTemplate(False, formats.JSON, None, {})


def test_flags_win_over_the_template() -> None:
    source = "{{ tools }}<tool_call>{{ '</think>' }}"
    read = read_tool_template(source, True, {}, "llama3_json", "magistral")
    assert read.format is formats.LLAMA3_JSON
    assert read.reasoning is not None
    assert read.reasoning.begin == "[THINK]"
    off = read_tool_template(source, True, {}, "none", "none")
    assert (off.format, off.reasoning) == (None, None)
