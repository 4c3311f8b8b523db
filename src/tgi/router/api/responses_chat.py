"""A request of OpenAI's responses -> the chat that it means. Renders nothing; leaves values to validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tgi.errors import InvalidRequest
from tgi.router.api.translation import shared_fields
from tgi.router.schema.chat import ChatRequest, Message
from tgi.router.schema.responses import InputItem, InputPart, ResponsesRequest, ResponsesTool, ResponsesToolChoice
from tgi.router.schema.tools import FunctionDefinition, FunctionName, NamedTool, Tool, ToolChoice

NAMES = {"messages": "input", "response_format": "text.format"}
"""A chat's fields, where responses call them otherwise."""

LOGPROBS = "message.output_text.logprobs"
"""The one entry of `include` that means something here."""

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

_WORDS = ("auto", "none", "required")

_STATE = "this server keeps nothing between requests: send the whole conversation as `input`"
_REFUSED = {
    "previous_response_id": _STATE,
    "conversation": _STATE,
    "prompt": "this server keeps no prompts: send `instructions` and `input`",
    "background": "this server answers while the client waits: leave it out, or stream",
}


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Raises InvalidRequest for what a text model cannot take, tools of OpenAI's own, and what needs a store."""
    for name, advice in _REFUSED.items():
        if getattr(body, name):
            raise InvalidRequest(f"`{name}` is not supported: {advice}", name)
    tools, choice = _tools_and_choice(body)
    fields = shared_fields(body)
    fields["user"] = body.safety_identifier or body.user  # the newer name of the same
    return ChatRequest(
        **fields,
        messages=_messages(body),
        max_tokens=body.max_output_tokens,
        stop=body.stop,
        logprobs=body.include is not None and LOGPROBS in body.include,
        top_logprobs=body.top_logprobs,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if body.text is None or body.text.format is None else _response_format(body.text.format),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _messages(body: ResponsesRequest) -> list[Message]:
    conversation = _Conversation()
    if body.instructions:
        conversation.messages.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        conversation.messages.append(Message(role="user", content=body.input))
    else:
        for index, item in enumerate(body.input):
            conversation.add(item, f"input[{index}]")
    return _with_one_system(conversation.finish())


class _Conversation:
    """Items -> messages. Those that the assistant makes one after the other (thoughts, text, calls) are one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of functions, by the call's id

    def add(self, item: InputItem, where: str) -> None:
        match item.type:
            case None | "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_thought(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                self._add_output(item, where)
            case "item_reference":
                raise InvalidRequest(f"`{where}` refers to an item that was not kept: send the item itself", "input")
            case _:
                raise InvalidRequest(f"`{where}` is of type `{item.type}`, which this server does not take", "input")

    def finish(self) -> list[Message]:
        """Of an assistant's last items too."""
        if self._thoughts or self._texts or self._calls:
            self.messages.append(
                Message(
                    role="assistant",
                    content="".join(self._texts) if self._texts or not self._calls else None,
                    reasoning_content="".join(self._thoughts) or None,
                    tool_calls=self._calls or None,
                )
            )
            self._thoughts, self._texts, self._calls = [], [], []
        return self.messages

    def _add_message(self, item: InputItem, where: str) -> None:
        if item.role is None or item.content is None:
            raise InvalidRequest(f"`{where}` needs `role` and `content`", "input")
        text = _text(item.content, f"{where}.content")
        if item.role == "assistant":
            self._texts.append(text)
        else:
            self.finish().append(Message(role=item.role, content=text))

    def _add_thought(self, item: InputItem, where: str) -> None:
        """One that is encrypted alone says nothing to the model."""
        field = "content" if item.content else "summary"
        text = _text(item.content or item.summary or "", f"{where}.{field}")
        if text:
            self._thoughts.append(text)

    def _add_call(self, item: InputItem, where: str) -> None:
        if item.call_id is None or item.name is None:
            raise InvalidRequest(f"`{where}` needs `call_id`, `name` and `arguments`", "input")
        self._names[item.call_id] = item.name
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        self._calls.append({"id": item.call_id, "type": "function", "function": function})

    def _add_output(self, item: InputItem, where: str) -> None:
        if item.call_id is None or item.output is None:
            raise InvalidRequest(f"`{where}` needs `call_id` and `output`", "input")
        self.finish().append(
            Message(
                role="tool",
                content=_text(item.output, f"{where}.output"),
                tool_call_id=item.call_id,
                name=self._names.get(item.call_id),
            )
        )


def _text(content: str | Sequence[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: InputPart, where: str) -> str:
    if part.type in TEXTS or part.type == "refusal":
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise InvalidRequest(f"`{where}` is of type `{part.type}` but has no text", "input")
        return text
    if part.type in ("input_image", "input_file", "input_audio"):
        kind = part.type.removeprefix("input_")
        article = "a" if kind == "file" else "an"
        raise InvalidRequest(f"`{where}` is {article} {kind}, but this model takes text only", "input")
    raise InvalidRequest(f"`{where}` is of type `{part.type}`, but this model takes `input_text` only", "input")


def _with_one_system(messages: list[Message]) -> list[Message]:
    """Instructions and the system's messages behind them as one: many templates take no second one."""
    num_leading = next(
        (at for at, message in enumerate(messages) if message.role not in ("system", "developer")), len(messages)
    )
    if num_leading < 2:
        return messages
    text = "\n\n".join(str(message.content) for message in messages[:num_leading])
    return [Message(role="system", content=text), *messages[num_leading:]]


def _tools_and_choice(body: ResponsesRequest) -> tuple[list[Tool] | None, ToolChoice | None]:
    tools = None if body.tools is None else [_tool(tool, index) for index, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if not isinstance(choice, ResponsesToolChoice):
        if choice not in (None, *_WORDS):
            raise InvalidRequest(
                f"`tool_choice` must be `auto`, `none`, `required` or an object. Given: {choice}", "tool_choice"
            )
        return tools, choice
    if choice.type == "allowed_tools":
        return _allowed(tools or [], choice)
    if choice.type != "function" or choice.name is None:
        raise InvalidRequest(
            "`tool_choice` must be of type `function`, with a `name`, or of type `allowed_tools`. "
            f"Given: {choice.type}",
            "tool_choice",
        )
    return tools, NamedTool(function=FunctionName(choice.name))


def _allowed(tools: Sequence[Tool], choice: ResponsesToolChoice) -> tuple[list[Tool], ToolChoice]:
    """The model sees the allowed tools alone: what it does not know it does not call."""
    if choice.mode not in ("auto", "required"):
        raise InvalidRequest(f"`tool_choice.mode` must be `auto` or `required`. Given: {choice.mode}", "tool_choice")
    names = [tool.get("name") for tool in choice.tools or ()]
    known = {tool.function.name for tool in tools}
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise InvalidRequest(f"`tool_choice.tools[{index}]` needs a `name`", "tool_choice")
        if name not in known:
            raise InvalidRequest(f"`tool_choice.tools` names `{name}`, which is not among the `tools`", "tool_choice")
    allowed = set(names)
    return [tool for tool in tools if tool.function.name in allowed], choice.mode


def _tool(tool: ResponsesTool, index: int) -> Tool:
    if tool.type != "function":
        raise InvalidRequest(
            f"`tools[{index}]` is of type `{tool.type}`, which this server does not have: it takes tools of type "
            "`function` only",
            "tools",
        )
    if not tool.name:
        raise InvalidRequest(f"`tools[{index}].name` must not be empty", "tools")
    return Tool(
        function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    )


def _response_format(format: Mapping[str, Any]) -> dict[str, Any]:
    """Responses have the schema beside the type, chats in an object of its own."""
    if format.get("type") != "json_schema":
        return dict(format)
    if format.get("schema") is None:
        raise InvalidRequest("`text.format` of type `json_schema` needs a `schema`", "text.format")
    return {"type": "json_schema", "json_schema": {"schema": format["schema"]}}
