"""A request of Anthropic's messages -> the chat that it means. Renders nothing; leaves values to validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tgi.errors import InvalidRequest
from tgi.router.api.translation import shared_fields
from tgi.router.schema.chat import ChatRequest, Message
from tgi.router.schema.messages import (
    CountTokensRequest,
    InputBlock,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    Thinking,
    Turn,
)
from tgi.router.schema.tools import FunctionDefinition, FunctionName, NamedTool, Tool, ToolChoice

NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""A chat's fields, where Anthropic calls them otherwise."""

ERROR_MARK = "Error: "
"""Before the result of a tool that failed: templates have no word for it."""

_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def chat_of(
    body: CountTokensRequest, max_tokens: int | None = None, stop_sequences: list[str] | None = None
) -> ChatRequest:
    """Raises InvalidRequest for what a text model cannot take and for tools that only Anthropic runs."""
    choice = body.tool_choice
    fields = shared_fields(body)
    if body.metadata is not None:
        fields["user"] = body.metadata.user_id
    fields["chat_template_kwargs"] = _thinking(body.thinking) | (body.chat_template_kwargs or {})
    return ChatRequest(
        **fields,
        messages=_messages(body),
        max_tokens=max_tokens,
        stop=stop_sequences,
        tools=None if body.tools is None else [_tool(tool, index) for index, tool in enumerate(body.tools)],
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_response_format(body.output_config),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
    )


def _messages(body: CountTokensRequest) -> list[Message]:
    if not body.messages:
        raise InvalidRequest("`messages` must not be empty", "messages")
    messages: list[Message] = []
    if body.system:
        messages.append(Message(role="system", content=_text(body.system, "system")))
    names: dict[str, str] = {}  # of tools, by the call's id
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}]"
        if turn.role == "assistant":
            messages.append(_assistant_message(turn, where, names))
        elif turn.role in ("user", "system"):
            messages += _messages_of_turn(turn, where, names)
        else:
            raise InvalidRequest(f"`{where}.role` must be `user` or `assistant`. Given: {turn.role}", "messages")
    return _alternating(messages)


def _assistant_message(turn: Turn, where: str, names: dict[str, str]) -> Message:
    if isinstance(turn.content, str):
        return Message(role="assistant", content=turn.content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(turn.content):
        place = f"{where}.content[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # nobody but Anthropic can read it
            case "tool_use":
                calls.append(_call(block, place, names))
            case _:
                texts.append(_block_text(block, place))
    return Message(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _messages_of_turn(turn: Turn, where: str, names: Mapping[str, str]) -> list[Message]:
    """What a user's turn says: results of tools first, as templates want them behind the calls."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    results: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(turn.content):
        place = f"{where}.content[{index}]"
        if block.type == "tool_result":
            results.append(_result(block, place, names))
        else:
            texts.append(_block_text(block, place))
    if not texts and results:
        return results
    return [*results, Message(role=turn.role, content="".join(texts))]


def _call(block: InputBlock, place: str, names: dict[str, str]) -> dict[str, Any]:
    if block.id is None or block.name is None:
        raise InvalidRequest(f"`{place}` is of type `tool_use` and needs `id`, `name` and `input`", "messages")
    names[block.id] = block.name
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": block.input or {}},
    }


def _result(block: InputBlock, place: str, names: Mapping[str, str]) -> Message:
    if block.tool_use_id is None:
        raise InvalidRequest(f"`{place}` is of type `tool_result` and needs a `tool_use_id`", "messages")
    text = _text(block.content or "", f"{place}.content")
    return Message(
        role="tool",
        content=ERROR_MARK + text if block.is_error else text,
        tool_call_id=block.tool_use_id,
        name=names.get(block.tool_use_id),
    )


def _text(content: str | Sequence[InputBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def _block_text(block: InputBlock, where: str) -> str:
    param = where.partition("[")[0]
    if block.type == "text":
        if block.text is None:
            raise InvalidRequest(f"`{where}` is of type `text` but has no `text`", param)
        return block.text
    if block.type in ("image", "document"):
        article = "an image" if block.type == "image" else "a document"
        raise InvalidRequest(f"`{where}` is {article}, but this model takes text only", param)
    raise InvalidRequest(f"`{where}` is of type `{block.type}`, which this model does not take here", param)


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Turns of the user that follow each other are one turn, as at Anthropic: many templates insist on a change."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role == "user":
            merged[-1] = Message(role="user", content=f"{merged[-1].content}\n\n{message.content}")
        else:
            merged.append(message)
    return merged


def _tool(tool: MessagesTool, index: int) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"`tools[{index}]` is Anthropic's own tool `{tool.type}`, which this server does not have; "
            "give it with a `description` and an `input_schema` instead of the `type`",
            "tools",
        )
    if not tool.name:
        raise InvalidRequest(f"`tools[{index}].name` must not be empty", "tools")
    return Tool(function=FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema))


def _tool_choice(choice: MessagesToolChoice) -> ToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("`tool_choice` of type `tool` needs a `name`", "tool_choice")
        return NamedTool(function=FunctionName(choice.name))
    if choice.type not in _CHOICES:
        raise InvalidRequest(
            f"`tool_choice.type` must be one of `auto`, `any`, `tool` and `none`. Given: {choice.type}", "tool_choice"
        )
    return _CHOICES[choice.type]


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    """Template variables, under both names that are in use. A client that does not ask for thoughts wants none."""
    kind = "disabled" if thinking is None else thinking.type
    if kind not in _THINKS:
        raise InvalidRequest(
            f"`thinking.type` must be one of {', '.join(f'`{name}`' for name in _THINKS)}. Given: {kind}", "thinking"
        )
    return {"enable_thinking": _THINKS[kind], "thinking": _THINKS[kind]}


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    kind, schema = config.format.get("type"), config.format.get("schema")
    if kind != "json_schema" or schema is None:
        raise InvalidRequest(
            "`output_config.format` must be an object with the type `json_schema` and a `schema`",
            "output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"schema": schema}}
