from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tgi.errors import InvalidRequest
from tgi.router.chat.dialect import Dialect
from tgi.router.chat.messages import in_dialect, template_messages, with_calls_as_text
from tgi.router.schema.chat import Message

COMMON = Dialect(uses_tools=True, content_as_parts=False, null_content=False, arguments_as_text=False)


def flatten(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages(msgspec.convert(list(messages), list[Message]))


def refusal(*messages: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        flatten(*messages)
    assert caught.value.param == "messages"
    return str(caught.value)


def test_plain_content_and_any_role_pass() -> None:
    messages = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "tool", "critic")]
    assert flatten(*messages) == messages


@pytest.mark.fault("vllm#25001")
@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
def test_text_parts_are_joined_for_every_role(role: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert flatten({"role": role, "content": parts}) == [{"role": role, "content": "ab"}]


def test_other_parts_are_refused_by_place() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    assert refusal({"role": "user", "content": "x"}, {"role": "user", "content": [image]}) == (
        "`messages[1].content[0]` is an image, but this model takes text only"
    )
    assert refusal({"role": "user", "content": [{"type": "input_audio"}]}) == (
        "`messages[0].content[0]` is of type `input_audio`, but this model takes `text` only"
    )
    assert refusal({"role": "user", "content": [{"type": "text"}]}) == (
        "`messages[0].content[0]` is of type `text` but has no `text`"
    )


@pytest.mark.parametrize("calls", [None, []])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_message_needs_content_or_calls(role: str, calls: list[Any] | None) -> None:
    assert refusal({"role": role, "content": None, "tool_calls": calls}) == (
        "`messages[0]` needs `content` or `tool_calls`"
    )


@pytest.mark.fault("vllm#13978")
def test_an_empty_list_of_calls_is_absent() -> None:
    assert flatten({"role": "assistant", "content": "x", "tool_calls": []}) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_the_template_under_the_usual_names(field: str) -> None:
    (message,) = flatten({"role": "assistant", "content": None, field: "Well"})
    expected = {"role": "assistant", "content": "", "reasoning_content": "Well", "thinking": "Well"}
    assert message == expected | {field: "Well"}


def test_of_several_thoughts_the_first_name_counts() -> None:
    (message,) = flatten({"role": "assistant", "content": "x", "reasoning": "r", "thinking": "t"})
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "t", "thinking": "t", "reasoning": "r"}


def test_a_refusal_is_what_the_assistant_said() -> None:
    part = {"type": "refusal", "refusal": "No."}
    for message in ({"content": None, "refusal": "No."}, {"content": [part]}):
        assert flatten({"role": "assistant", **message}) == [{"role": "assistant", "content": "No."}]
    assert refusal({"role": "assistant", "content": [{"type": "refusal"}]}) == (
        "`messages[0].content[0]` is of type `refusal` but has no `refusal`"
    )


def test_image_markdown_is_plain_text() -> None:
    message = {"role": "user", "content": "![](http://127.0.0.1:1/cat.png)"}
    assert flatten(message) == [message]


@pytest.mark.fault("TGI#2986")
def test_calls_and_results_keep_their_structure() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Kyōto"}'}}
    result = {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "f"}
    messages = flatten({"role": "assistant", "content": None, "tool_calls": [call]}, result)
    assert messages == [{"role": "assistant", "content": None, "tool_calls": [call]}, result]


def calls_in(dialect: Dialect, *calls: Any) -> list[Any]:
    (message,) = in_dialect(flatten({"role": "assistant", "tool_calls": list(calls)}), dialect)
    return message["tool_calls"]


@pytest.mark.fault("transformers#45419")
def test_arguments_are_an_object_or_text_as_the_template_wants() -> None:
    text = {"id": "c1", "function": {"name": "f", "arguments": '{"city":"Kyōto"}'}}
    structure = {"id": "c1", "function": {"name": "f", "arguments": {"city": "Kyōto"}}}
    assert calls_in(COMMON, text, structure) == [structure, structure]
    spelled = {"id": "c1", "function": {"name": "f", "arguments": '{"city": "Kyōto"}'}}
    wanting_text = replace(COMMON, arguments_as_text=True)
    assert calls_in(wanting_text, text, structure) == [text, spelled]


@pytest.mark.fault("transformers#45419")
@pytest.mark.parametrize(
    ("dialect", "content"),
    [
        (COMMON, ""),
        (replace(COMMON, null_content=True), None),
        (replace(COMMON, content_as_parts=True), []),
        (replace(COMMON, content_as_parts=True, null_content=True), None),
    ],
)
def test_null_content_is_what_works_for_the_template(dialect: Dialect, content: Any) -> None:
    messages = flatten({"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]})
    assert in_dialect(messages, dialect)[0]["content"] == content
    assert messages[0]["content"] is None


def test_text_becomes_a_part_for_templates_that_want_parts() -> None:
    messages = flatten({"role": "user", "content": "x"}, {"role": "tool", "content": "", "name": "f"})
    assert in_dialect(messages, replace(COMMON, content_as_parts=True)) == [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "tool", "content": [{"type": "text", "text": ""}], "name": "f"},
    ]
    assert in_dialect(messages, COMMON) == messages


@pytest.mark.fault("llama.cpp#14051")
@pytest.mark.parametrize("arguments", ["{not json", "", "[1]", "3", "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert calls_in(COMMON, call) == [call]


@pytest.mark.parametrize("arguments_as_text", [False, True])
def test_calls_of_an_unknown_shape_pass_as_they_are(arguments_as_text: bool) -> None:
    calls: list[dict[str, Any]] = [{"function": "f"}, {"name": "g"}, {"function": {"arguments": [1]}}]
    assert calls_in(replace(COMMON, arguments_as_text=arguments_as_text), *calls) == calls


def test_arguments_that_cannot_be_spelled_are_left_to_the_template() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    call = {"function": {"name": "f", "arguments": deep}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert in_dialect([message], replace(COMMON, arguments_as_text=True))[0]["tool_calls"][0] is call


@pytest.mark.fault("TGI#2986")
def test_calls_become_text_beside_their_structure() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city":"Kyōto"}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"id": "c3", "type": "function", "function": {"name": "h", "arguments": "{no"}},
        {"of": "its own kind"},
    ]
    text = (
        '{"name": "f", "arguments": {"city": "Kyōto"}}\n{"name": "g", "arguments": {}}\n'
        '{"name": "h", "arguments": "{no"}\n{"of": "its own kind"}'
    )
    user = {"role": "user", "content": "Hi"}
    for content, written in ((None, text), ("", text), ("I look.", f"I look.\n{text}")):
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        assert with_calls_as_text([user, message]) == [user, {**message, "content": written}]
        assert message["content"] == content, "the caller's are left alone"
