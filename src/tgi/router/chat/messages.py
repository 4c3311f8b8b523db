"""Messages of a chat request -> what a template takes: content as one text, tool calls as structure.

`template_messages` is the same for every template; `in_dialect` then gives one template the shapes that it reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tgi.errors import InvalidRequest
from tgi.router.chat.dialect import Dialect
from tgi.router.schema.chat import ContentPart, Message

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an assistant's thoughts back; the first one given is meant."""

TEXT_PARTS = ("text", "input_text", "output_text")

Messages = list[dict[str, Any]]


def template_messages(messages: Sequence[Message]) -> Messages:
    """-> {"role", "content": text or None where there are calls only, and what else was given}.

    Raises InvalidRequest for content that a text model cannot take, naming the message.
    """
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def in_dialect(messages: Messages, dialect: Dialect) -> Messages:
    """The same messages in the template's shapes; those given are left alone."""
    return [_message_in(message, dialect) for message in messages]


def with_developer_as_system(messages: Messages) -> Messages:
    return [{**message, "role": "system"} if message.get("role") == "developer" else message for message in messages]


def with_calls_as_text(messages: Messages) -> Messages:
    """For a template that never looks at calls: a model that does not see what it has called would call it again."""
    return [_with_calls_as_text(message) if message.get("tool_calls") else message for message in messages]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    calls = message.tool_calls or None  # an empty list means none, to templates too
    reasoning = next((text for field in REASONING_FIELDS if (text := getattr(message, field)) is not None), None)
    content = message.content if message.content is not None else message.refusal
    if isinstance(content, list):
        content = "".join(_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    if content is None and calls is None:
        if reasoning is None:
            raise InvalidRequest(f"`{where}` needs `content` or `tool_calls`", "messages")
        content = ""
    result: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning is not None:
        # As transformers names it: templates read one of the first two, some the third.
        thinking = reasoning if message.thinking is None else message.thinking
        result |= {"reasoning_content": reasoning, "thinking": thinking}
        if message.reasoning is not None:
            result["reasoning"] = message.reasoning
    if calls is not None:
        result["tool_calls"] = calls
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    return result


def _part_text(part: ContentPart, where: str) -> str:
    if part.type in TEXT_PARTS or part.type == "refusal":
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            field = "refusal" if part.type == "refusal" else "text"
            raise InvalidRequest(f"`{where}` is of type `{part.type}` but has no `{field}`", "messages")
        return text
    if part.type == "image_url":
        raise InvalidRequest(f"`{where}` is an image, but this model takes text only", "messages")
    raise InvalidRequest(f"`{where}` is of type `{part.type}`, but this model takes `text` only", "messages")


def _message_in(message: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    changed: dict[str, Any] = {}
    if content is None:
        # Templates that do not ask add and strip content as if it were always there.
        changed["content"] = None if dialect.null_content else [] if dialect.content_as_parts else ""
    elif dialect.content_as_parts:
        changed["content"] = [{"type": "text", "text": content}]
    if calls is not None:
        convert = _with_text_arguments if dialect.arguments_as_text else _with_parsed_arguments
        changed["tool_calls"] = [convert(call) for call in calls]
    return {**message, **changed} if changed else message


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A JSON object a line, as a model without a format of its own is told to write calls."""
    try:
        lines = [json.dumps(_call_object(call), ensure_ascii=False) for call in message["tool_calls"]]
    except (ValueError, RecursionError):
        return message
    content = message.get("content")
    return {**message, "content": "\n".join([*([content] if content else []), *lines])}


def _call_object(call: dict[str, Any]) -> dict[str, Any]:
    """{"name", "arguments"}; a call of an unknown shape as it is."""
    function = _with_parsed_arguments(call).get("function")
    if not isinstance(function, dict) or "name" not in function:
        return call
    return {"name": function["name"], "arguments": function.get("arguments") or {}}


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI sends arguments as JSON in a string, templates want the object; what is no object stays text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    try:
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
    except (ValueError, RecursionError):
        return call  # for the template to refuse
    return {**call, "function": {**function, "arguments": arguments}}
