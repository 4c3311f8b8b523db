"""Wire types of OpenAI's text completions, with TGI's and our additions.

Every optional field takes null as "not given"; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from tgi.router.schema.chat import StreamOptions, Usage
from tgi.router.schema.numbers import UInt, UInt32
from tgi.router.schema.shared_fields import AnswerFields


class CompletionRequest(AnswerFields, frozen=True, kw_only=True):
    prompt: str | list[str | UInt32 | list[UInt32]]  # a text, texts, the ids of one prompt, or of several
    best_of: UInt | None = None
    echo: bool | None = None
    logprobs: UInt32 | None = None
    max_tokens: UInt32 | None = None
    n: UInt | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None

    ignore_eos_token: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionLogprobs(Struct, frozen=True):
    """Columns, an entry per token. The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters into the choice's text


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None  # null in all chunks of a stream but a choice's last
    stop_reason: str | int | UnsetType = UNSET  # which stop string or stop id matched
    seed: int | UnsetType = UNSET  # with which the answer was sampled


class Completion(Struct, frozen=True, kw_only=True):
    """A whole answer, and a chunk of a stream: OpenAI gives both the same name."""

    object: str = "text_completion"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None
