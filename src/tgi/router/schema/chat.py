"""Wire types of OpenAI's chat completions, with TGI's and our additions.

Every optional field takes null as "not given"; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from tgi.router.schema.numbers import Int32, UInt, UInt32


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None
    image_url: Any = None


class Message(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class ChatRequest(Struct, frozen=True, kw_only=True):
    messages: list[Message]
    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | list[float] | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    max_tokens: UInt32 | None = None
    max_completion_tokens: UInt32 | None = None
    n: UInt | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_prompt: str | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: UInt32 | None = None
    stop_token_ids: list[UInt32] | None = None
    ignore_eos: bool | None = None
    ignore_eos_token: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 | None = None
    cache: bool | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct, frozen=True):
    content: list[TokenLogprob]


class AssistantMessage(Struct, frozen=True):
    role: str
    content: str


class Choice(Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: Logprobs | None
    finish_reason: str
    stop_reason: str | int | UnsetType = UNSET  # which stop string or stop id matched
    seed: int | UnsetType = UNSET  # with which the answer was sampled


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatCompletion(Struct, frozen=True, kw_only=True):
    object: str = "chat.completion"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


class Delta(Struct, frozen=True):
    role: str
    content: str


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: str | None
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
