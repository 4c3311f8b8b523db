"""Messages of a chat request -> what a template takes: content as one text, tool calls as structure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tgi.errors import InvalidRequest
from tgi.router.schema.chat import ContentPart, Message


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises InvalidRequest for content that a text model cannot take, naming the message."""
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    calls = message.tool_calls or None  # an empty list means none, to templates too
    content = message.content
    if content is None and calls is None:
        raise InvalidRequest(f"`{where}` needs `content` or `tool_calls`", "messages")
    if isinstance(content, list):
        content = "".join(_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    # Templates add and strip content without asking whether it is there.
    result: dict[str, Any] = {"role": message.role, "content": content or ""}
    if calls is not None:
        result["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    return result


def _part_text(part: ContentPart, where: str) -> str:
    if part.type == "text":
        if part.text is None:
            raise InvalidRequest(f"`{where}` is of type `text` but has no `text`", "messages")
        return part.text
    if part.type == "image_url":
        raise InvalidRequest(f"`{where}` is an image, but this model takes text only", "messages")
    raise InvalidRequest(f"`{where}` is of type `{part.type}`, but this model takes `text` only", "messages")


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI sends arguments as JSON in a string, templates want the object; what is no JSON stays text."""
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
