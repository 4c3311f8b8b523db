"""Fields that several routes of `/v1` have under the same name, so that each stands once."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from tgi.router.schema.numbers import Int32, UInt32


class AnswerFields(Struct, frozen=True, kw_only=True):
    """Of text completions, chats, and the protocols translated into chats. The second group are extensions to some."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | list[float] | None = None
    user: str | None = None
    seed: int | None = None
    min_tokens: UInt32 | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[UInt32] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Int32 | None = None
    cache: bool | None = None
    cache_salt: str | None = None


class SharedFields(AnswerFields, frozen=True, kw_only=True):
    """Of chats and the protocols translated into chats (Responses, Messages)."""

    chat_template: str | None = None  # name of one of the model's templates, never a text
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
