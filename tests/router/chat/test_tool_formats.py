from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.chat.answers import (
    CALLS,
    HARD,
    HUGE,
    PLAIN,
    WRITERS,
    Writer,
    calls_of,
    content_of,
    feed,
    merged,
    parse,
    parser,
    reasoning_of,
)
from tgi.enums import ToolCallParser
from tgi.router.chat import tool_formats as formats
from tgi.router.chat.answer import CallArguments, CallBegin, Content, make_answer_parser
from tgi.router.chat.json_scan import JsonScanner
from tgi.router.chat.reasoning import THINK
from tgi.router.chat.tool_formats import BY_NAME, FORMATS, detect_format

each_writer = pytest.mark.parametrize("writer", WRITERS, ids=str)
PYTHON = "gemma-python"
XML = "qwen3-coder"
HELD_WHOLE = {PYTHON}  # formats whose calls are told when they are complete
UNSPEAKABLE = {XML, PYTHON}  # text that ends a call also ends a value: </parameter>, ```


def speakable(writer: Writer, calls: list) -> list:
    return [call for call in calls if call is not HARD] if writer.name in UNSPEAKABLE else calls


@each_writer
@pytest.mark.parametrize("calls", CALLS.values(), ids=list(CALLS))
@pytest.mark.fault("vllm#31501")
def test_calls_are_read_however_the_text_is_cut(writer: Writer, calls: list) -> None:
    calls = speakable(writer, calls) or [PLAIN]
    parts = parse(writer.write(calls), writer.format)
    assert calls_of(parts) == calls
    assert content_of(parts) == ""


@each_writer
def test_text_around_calls_is_content_without_the_blanks_between(writer: Writer) -> None:
    parts = parse(f" I look. \n\n{writer.write([PLAIN, PLAIN])}\n\n Here you are.\n", writer.format)
    assert calls_of(parts) == [PLAIN, PLAIN]
    first, last = parts[0], parts[-1]
    assert first == Content(" I look.")
    assert last == Content("Here you are.\n")
    assert content_of(parts) == " I look.Here you are.\n"


@each_writer
def test_thinking_text_before_calls_stays_thinking_text(writer: Writer) -> None:
    thought = f"Shall I write {writer.write([PLAIN])}? Yes."
    parts = parse(f"<think>\n{thought}\n</think>\n\n{writer.write([PLAIN])}", writer.format, THINK)
    assert reasoning_of(parts) == thought
    assert calls_of(parts) == [PLAIN]
    assert content_of(parts) == ""


@each_writer
def test_a_huge_call_in_pieces_of_any_length(writer: Writer) -> None:
    text = writer.write([HUGE])
    for length in (1, 7, 1000):
        pieces = [text[at : at + length] for at in range(0, len(text), length)]
        assert calls_of(merged(feed(parser(writer.format), pieces))) == [HUGE]


@each_writer
@given(data=st.data())
def test_random_cuts_change_nothing(writer: Writer, data: st.DataObject) -> None:
    text = f"Well:\n{writer.write(speakable(writer, CALLS['several']))}\n bye"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
    assert merged(feed(parser(writer.format), pieces)) == merged(feed(parser(writer.format), [text]))


@each_writer
@pytest.mark.fault("TGI#2145")
def test_a_cut_call_keeps_what_there_is_and_nothing_fails(writer: Writer) -> None:
    """What is not recognised yet is content; what was begun is a call, its arguments a beginning of the whole ones."""
    text = "ok " + writer.write([PLAIN])
    whole = merged(feed(parser(writer.format), [text]))
    arguments = next(part.text for part in whole if isinstance(part, CallArguments))
    for length in range(len(text)):
        parts = merged(feed(parser(writer.format), [text[:length]]))
        begun = [part for part in parts if isinstance(part, CallBegin)]
        if begun:
            assert begun[0].name == "get_weather"
            assert arguments.startswith("".join(part.text for part in parts if isinstance(part, CallArguments)))
            assert content_of(parts) == "ok"
        else:
            assert content_of(parts) == text[:length]


@each_writer
def test_arguments_stream_as_they_come(writer: Writer) -> None:
    """Never more than the text so far holds, and (but for formats that must convert) no less."""
    text = writer.write([PLAIN])
    reading = parser(writer.format)
    pushed = seen = ""
    for character in text:
        pushed += character
        seen += "".join(part.text for part in reading.push(character, False) if isinstance(part, CallArguments))
        if writer.name not in (*HELD_WHOLE, XML):
            # TGI's old form opens the arguments before the name.
            shown = seen.removeprefix("{") if writer.name == "json-old-tgi" else seen
            assert pushed.endswith(shown) or shown in pushed
    if writer.name in HELD_WHOLE:
        return
    half = parser(writer.format)
    begin = text.index("Oslo") + 2
    parts = feed(half, [text[:begin]])
    assert any(isinstance(part, CallBegin) for part in parts)


@each_writer
@given(text=st.text(alphabet='<>{}[]":,;`|/ \n\\a1', max_size=40))
def test_garbage_is_content_and_never_an_error(writer: Writer, text: str) -> None:
    for opener in writer.format.openers:
        parts = merged(feed(parser(writer.format), list(opener + text)))
        assert parts == merged(feed(parser(writer.format), [opener + text]))
        if not any(isinstance(part, CallBegin) for part in parts):
            assert content_of(parts) == opener + text


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize(
    "text",
    [
        "Plain text, nothing else.",
        "if (a < b) { return [1, 2]; } // <tag> [link](url)\n",
        "```python\nd = {'a': 1}\nprint(d)\n```\n",
        '{"answer": 42, "name": "get_weather"}',
        '{"name": "Ada", "arguments": {"age": 36}} is JSON, not a call'.replace("arguments", "data"),
        "<tool_call",
        "<tool_call>nothing</tool_call>",
        "[TOOL_CALLS] none",
        "[",
        "{",
        " \n ",
        "",
    ],
)
def test_text_without_calls_is_untouched(format: formats.ToolFormat, text: str) -> None:
    parts = parse(text, format)
    assert content_of(parts) == text
    assert all(isinstance(part, Content) for part in parts)


def test_a_mark_makes_a_call_even_of_an_unknown_tool() -> None:
    """The client answers it with an error for the model; to show it as text would help nobody."""
    text = '<tool_call>{"name": "no_such", "arguments": {"a": 1}}</tool_call>'
    assert calls_of(parse(text, formats.HERMES)) == [("no_such", {"a": 1})]


def test_without_a_mark_only_known_tools_are_called() -> None:
    text = '{"name": "no_such", "arguments": {"a": 1}}'
    assert parse(text, formats.JSON) == [Content(text)]


def test_a_tool_that_is_described_is_not_called() -> None:
    text = json.dumps({"type": "function", "function": {"name": "now", "description": "d", "parameters": {}}})
    assert parse(text, formats.JSON) == [Content(text)]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"arguments": {"city": "Oslo"}, "name": "get_weather"}', [("get_weather", {"city": "Oslo"})]),
        ('{"type": "function", "name": "now", "parameters": {}}', [("now", {})]),
        ('{"name": "now"}', [("now", {})]),
        ('{"name": "now", "arguments": null}', [("now", {})]),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', [("get_weather", {"city": "Oslo"})]),
        ('{"function": "get_weather", "parameters": {"city": "Oslo"}}', [("get_weather", {"city": "Oslo"})]),
        ('{"type": "function", "function": {"name": "now", "arguments": {}}}', [("now", {})]),
        ('{"function": {"_name": "get_weather", "city": "Oslo"}}', [("get_weather", {"city": "Oslo"})]),
        ('{"function": {"_name": "now"}}', [("now", {})]),
        ('{"id": 7, "name": "now", "arguments": {}}', [("now", {})]),
    ],
)
def test_objects_that_models_make_of_a_call(text: str, calls: list) -> None:
    for format, answer in ((formats.JSON, text), (formats.HERMES, f"<tool_call>{text}</tool_call>")):
        parts = parse(answer, format)
        assert calls_of(parts) == calls
        assert content_of(parts) == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now", "arguments": 3}',
        '{"name": "now", "arguments": "no object"}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {"a": 1}}',
        '{name: "now"}',
    ],
)
def test_objects_that_are_no_calls(text: str) -> None:
    assert parse(text, formats.JSON) == [Content(text)]
    assert parse(f"<tool_call>{text}</tool_call>", formats.HERMES) == [Content(f"<tool_call>{text}</tool_call>")]


def test_a_call_within_a_strange_object_is_found() -> None:
    parts = parse('{"result": {"name": "now", "arguments": {}}}', formats.JSON)
    assert calls_of(parts) == [("now", {})]


@pytest.mark.parametrize("bracket", ["", "}", "}]", "}}"])
def test_a_bracket_too_few_or_too_many_before_the_end_tag_is_no_content(bracket: str) -> None:
    call = '{"name": "now", "arguments": {}' + bracket
    parts = parse(f"<tool_call>\n{call}\n</tool_call>\nok", formats.HERMES)
    assert calls_of(parts) == [("now", {})]
    assert content_of(parts) == "ok"


def test_arguments_that_break_off_end_there() -> None:
    parts = parse('<tool_call>{"name": "now", "arguments": {"a": 1</tool_call> ok', formats.HERMES)
    assert parts == [CallBegin(0, "0", "now"), CallArguments(0, '{"a": 1'), Content("ok")]


def test_almost_json_is_left_to_the_client() -> None:
    """OpenAI's contract: arguments are the model's own text."""
    parts = parse('<tool_call>{"name": "now", "arguments": {"a": True,}}</tool_call>', formats.HERMES)
    assert parts == [CallBegin(0, "0", "now"), CallArguments(0, '{"a": True,}')]


@pytest.mark.parametrize(
    ("schema_type", "text", "value"),
    [
        ("string", "12", "12"),
        ("string", '"quoted"', '"quoted"'),
        ("string", "null", "null"),
        ("integer", "12", 12),
        ("integer", "twelve", "twelve"),
        ("number", "12", 12),
        ("number", "1.5", 1.5),
        ("number", "NaN", "NaN"),
        ("number", "true", "true"),
        ("boolean", "true", True),
        ("array", '[1, "a"]', [1, "a"]),
        ("object", '{"a": {}}', {"a": {}}),
        (["string", "null"], "null", None),
        (["string", "integer"], "x", "x"),
        (None, "12", 12),
        (None, "free text", "free text"),
        (None, " two\nlines ", " two\nlines "),
    ],
)
def test_xml_values_become_json_by_their_schema(schema_type: object, text: str, value: object) -> None:
    answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    tools = {"f": {"type": "object", "properties": {"x": {} if schema_type is None else {"type": schema_type}}}}
    reading = make_answer_parser(formats.QWEN3_CODER, None, "", tools)
    assert reading is not None
    assert calls_of(merged(feed(reading, list(answer)))) == [("f", {"x": value})]


def test_xml_without_the_outer_tag_needs_a_known_tool() -> None:
    known = "<function=now>\n</function>"
    assert calls_of(parse(known, formats.QWEN3_CODER)) == [("now", {})]
    unknown = "<function=other>\n</function>"
    assert parse(unknown, formats.QWEN3_CODER) == [Content(unknown)]


def test_xml_cut_within_a_value_keeps_the_values_before_it() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nOs"
    assert parse(text, formats.QWEN3_CODER) == [CallBegin(0, "0", "get_weather"), CallArguments(0, '{"days": 3')]


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ('get_weather("Oslo", 2)', [("get_weather", {"city": "Oslo", "days": 2})]),
        ("print(get_weather(city='Oslo'))\nnow()", [("get_weather", {"city": "Oslo"}), ("now", {})]),
        ("api.search(q={'a': [1, None, True]})", [("api.search", {"q": {"a": [1, None, True]}})]),
        ("get_weather(city='\\d')", [("get_weather", {"city": "\\d"})]),
        ("[now(), get_weather(city='a')]", [("now", {}), ("get_weather", {"city": "a"})]),
    ],
)
def test_python_calls(code: str, calls: list) -> None:
    assert calls_of(parse(f"```tool_code\n{code}\n```", formats.GEMMA)) == calls


@pytest.mark.parametrize(
    "code",
    [
        "x = 1",
        "get_weather(city=open('f'))",
        "now(1)",
        "f(**{})",
        "(lambda: 1)()",
        "f(",
        "f(x=1e999)",
        "f(x=b'')",
        "print()",
        "",
        "f(x=" + "(" * 400 + ")" * 400 + ")",
        "f(x='" + "y" * 20_000 + "')",
    ],
    ids=lambda code: code[:16],
)
def test_python_that_is_no_call_is_content(code: str) -> None:
    text = f"```tool_code\n{code}\n```"
    assert merged(feed(parser(formats.GEMMA), [text])) == [Content(text)]


@pytest.mark.parametrize(
    "text",
    ['{"id":' * 5_000, "{" * 10_000, "```" * 10_000, "[" * 10_000, '<tool_call>{"arguments":{"x":"' + "y" * 60_000],
    ids=["nested", "braces", "fences", "lists", "string"],
)
def test_hostile_text_is_read_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format may look at a character a few times, not once per opener before it."""
    seen = 0
    feed_scanner = JsonScanner.feed

    def counting(self: JsonScanner, text: str, begin: int = 0) -> int:
        nonlocal seen
        end = feed_scanner(self, text, begin)
        seen += end - begin
        return end

    monkeypatch.setattr(JsonScanner, "feed", counting)
    for format in (formats.JSON, formats.HERMES, formats.GEMMA):
        seen = 0
        parts = merged(feed(parser(format), [text]))
        assert parts == [Content(text)]
        assert seen <= 2 * len(text)


# Small templates of our own, with what is characteristic of each family's.
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "hermes": CHATML + "{% if tools %}Answer within <tool_call></tool_call>: {{ tools | tojson }}{% endif %}",
    "qwen3_coder": CHATML + "{% for t in tools %}{{ t }}{% endfor %}<tool_call>\n<function=example>\n<parameter=p>",
    "llama3_json": "<|start_header_id|>system<|end_header_id|>\n{{ tools }} "
    'Answer as {"name": function, "parameters": dictionary}.',
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "mistral_v11": "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "gemma": "{{ tools }} Write calls as ```tool_code\nf()\n```",
    "granite": "<|start_of_role|>tools{{ tools }}<|tool_call|>",
    "deepseek_v3": "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    "deepseek_v31": "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "json": CHATML + "{{ tools | tojson }}",
}


@pytest.mark.parametrize(("name", "source"), TEMPLATES.items(), ids=list(TEMPLATES))
def test_the_template_says_which_format_it_is(name: str, source: str) -> None:
    assert detect_format(source, {}).name == name


def test_the_vocabulary_speaks_where_the_template_is_silent() -> None:
    assert detect_format("{{ tools }}", {"<tool_call>": 9}) is formats.HERMES
    assert detect_format("{{ tools }}", {"[TOOL_CALLS]": 9}) is formats.MISTRAL


def test_every_format_has_its_word() -> None:
    assert {"auto", "none", *BY_NAME} == set(ToolCallParser)
