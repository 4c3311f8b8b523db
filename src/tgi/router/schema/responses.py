"""Wire types of OpenAI's responses: requests read leniently, answers, and the events of a stream.

Every optional field of a request takes null as "not given"; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from tgi.router.schema.chat import TokenLogprob
from tgi.router.schema.numbers import UInt32
from tgi.router.schema.shared_fields import SharedFields


class InputPart(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True, kw_only=True):
    """An item of any type; which fields count hangs on the type. Without one it is a message."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class ResponsesTool(Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] | None = None


class ReasoningConfig(Struct, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextConfig(Struct, frozen=True, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(SharedFields, frozen=True, kw_only=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: UInt32 | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: UInt32 | None = None
    stop: str | list[str] | None = None  # an extension
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputReasoningDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponsesUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputReasoningDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ResponseFault(Struct, frozen=True):
    code: str
    message: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    created_at: int  # Unix seconds
    status: str = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False  # whatever the request says: nothing is kept
    temperature: float
    text: TextConfig
    tool_choice: str | ResponsesToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
    metadata: dict[str, str]


class ResponseCreated(Struct, frozen=True, tag_field="type", tag="response.created"):
    sequence_number: int
    response: ResponseObject


class ResponseInProgress(Struct, frozen=True, tag_field="type", tag="response.in_progress"):
    sequence_number: int
    response: ResponseObject


class ResponseCompleted(Struct, frozen=True, tag_field="type", tag="response.completed"):
    sequence_number: int
    response: ResponseObject


class ResponseIncomplete(Struct, frozen=True, tag_field="type", tag="response.incomplete"):
    sequence_number: int
    response: ResponseObject


class ResponseFailed(Struct, frozen=True, tag_field="type", tag="response.failed"):
    sequence_number: int
    response: ResponseObject


class OutputItemAdded(Struct, frozen=True, tag_field="type", tag="response.output_item.added"):
    sequence_number: int
    output_index: int
    item: OutputItem


class OutputItemDone(Struct, frozen=True, tag_field="type", tag="response.output_item.done"):
    sequence_number: int
    output_index: int
    item: OutputItem


class ContentPartAdded(Struct, frozen=True, tag_field="type", tag="response.content_part.added"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class ContentPartDone(Struct, frozen=True, tag_field="type", tag="response.content_part.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class OutputTextDelta(Struct, frozen=True, tag_field="type", tag="response.output_text.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(Struct, frozen=True, tag_field="type", tag="response.output_text.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(Struct, frozen=True, tag_field="type", tag="response.reasoning_text.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(Struct, frozen=True, tag_field="type", tag="response.reasoning_text.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.done"):
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class ResponseErrorEvent(Struct, frozen=True, tag_field="type", tag="error"):
    sequence_number: int
    code: str | None
    message: str
    param: str | None
    http_status_code: int  # which no status line can say any more


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | ResponseErrorEvent
)
