"""Wire types of Anthropic's messages: requests read leniently, answers, the events of a stream, errors.

Every optional field takes null as "not given"; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from tgi.router.schema.numbers import UInt32
from tgi.router.schema.shared_fields import SharedFields


class InputBlock(Struct, frozen=True, kw_only=True):
    """A block of content of any type; which fields count hangs on the type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None


class Turn(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[InputBlock]


class MessagesTool(Struct, frozen=True, kw_only=True):
    name: str | None = None
    type: str | None = None  # `custom`, or a tool that Anthropic runs or defines
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    type: str
    budget_tokens: UInt32 | None = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class Metadata(Struct, frozen=True, kw_only=True):
    user_id: str | None = None


class CountTokensRequest(SharedFields, frozen=True, kw_only=True):
    messages: list[Turn]
    system: str | list[InputBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    max_tokens: UInt32
    stop_sequences: list[str] | None = None


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str  # proves nothing; clients drop thoughts without one


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(Struct, frozen=True):
    thinking_tokens: int


class MessagesUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int  # those that were not found in the cache
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET  # where thinking text is looked for


class MessageAnswer(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(Struct, frozen=True):
    input_tokens: int


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: OutputBlock


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


class AnthropicErrorObject(Struct, frozen=True):
    type: str
    message: str


class AnthropicError(Struct, frozen=True, tag_field="type", tag="error"):
    """Body of an error on /v1/messages, and the event of one in a stream."""

    error: AnthropicErrorObject
    request_id: str


MessageEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicError
)
