from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tgi.errors import InvalidRequest
from tgi.router.chat.messages import template_messages
from tgi.router.schema.chat import Message


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


@pytest.mark.fault("transformers#45419", "TGI#2986")
def test_calls_and_results_reach_the_template_as_structure() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Kyōto"}'}}
    messages = flatten(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "f"},
    )
    assert messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "Kyōto"}}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "f"},
    ]


@pytest.mark.fault("llama.cpp#14051")
@pytest.mark.parametrize("arguments", ["{not json", "", "[1]", "3", "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert flatten({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"] == [call]


def test_calls_of_an_unknown_shape_pass_as_they_are() -> None:
    calls: list[dict[str, Any]] = [{"function": "f"}, {"name": "g"}, {"function": {"arguments": {"a": 1}}}]
    assert flatten({"role": "assistant", "content": "x", "tool_calls": calls})[0]["tool_calls"] == calls
