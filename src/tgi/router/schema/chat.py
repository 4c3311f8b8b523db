"""Wire types of OpenAI's chat completions, with TGI's and our additions.

Every optional field takes null as "not given"; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from tgi.router.schema.generate import TokenSlice
from tgi.router.schema.numbers import UInt, UInt32
from tgi.router.schema.shared_fields import SharedFields
from tgi.router.schema.tools import Tool, ToolChoice


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None


class Message(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None  # what an assistant said instead of content
    reasoning_content: str | None = None  # an assistant's thoughts, under any of three names
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with `include_usage`: in every chunk, of its choice so far


class ChatRequest(SharedFields, frozen=True, kw_only=True):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    max_tokens: UInt32 | None = None
    max_completion_tokens: UInt32 | None = None
    n: UInt | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_prompt: str | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # reaches the template as a variable of that name

    ignore_eos_token: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None  # None: no, since the template writes them
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str | None = None


class ChatTokens(Struct, frozen=True):
    """What /chat_tokenize answers."""

    tokenize_response: list[TokenSlice]
    templated_text: str


class TopLogprob(Struct, frozen=True):
    token: str  # a part of a character as U+FFFD
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str  # a part of a character as U+FFFD
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct, frozen=True):
    content: list[TokenLogprob]


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str  # JSON, as far as the model wrote it


class ToolCall(Struct, frozen=True):
    id: str
    type: str
    function: FunctionCall


class AssistantMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None  # null where there are calls and nothing else
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: Logprobs | None
    finish_reason: str
    stop_reason: str | int | UnsetType = UNSET  # which stop string or stop id matched
    seed: int | UnsetType = UNSET  # with which the answer was sampled


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # where thinking text is looked for


class ChatCompletion(Struct, frozen=True, kw_only=True):
    object: str = "chat.completion"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


class FunctionDelta(Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """The first piece of a call has id, type and name; all others have arguments alone."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET  # in a choice's first chunk: clients join what several chunks say
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None  # null in all chunks but the choice's last
    stop_reason: str | int | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None
