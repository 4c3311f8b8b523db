"""Wire types of TGI's own routes. Every optional field takes null as "not given"; unknown fields are ignored."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from tgi.router.schema.numbers import Int32, UInt, UInt32


class GenerateParameters(Struct, frozen=True, kw_only=True):
    """What a request may ask for, in the words of the native API. The second group are our additions.

    Also the form into which the other routes translate their bodies.
    """

    best_of: UInt | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: UInt32 | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: UInt | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None  # u64, checked by hand: msgspec's bounds end at i64
    top_n_tokens: UInt32 | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None

    min_p: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | list[float] | None = None
    min_tokens: UInt32 | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[UInt32] | None = None
    ignore_eos: bool | None = None
    ignore_eos_token: bool | None = None  # the wire protocol's name for the same
    include_stop_str_in_output: bool | None = None  # None: yes here, no on /v1
    priority: Int32 | None = None
    cache: bool | None = None
    cache_salt: str | None = None


# TGI samples when the whole object is missing, and is greedy when it is there without `do_sample`.
ABSENT_PARAMETERS = GenerateParameters(do_sample=True)


class GenerateRequest(Struct, frozen=True, kw_only=True):
    inputs: str
    parameters: GenerateParameters | None = None

    @property
    def wanted(self) -> GenerateParameters:
        return ABSENT_PARAMETERS if self.parameters is None else self.parameters


class CompatRequest(GenerateRequest, frozen=True, kw_only=True):
    stream: bool | None = None


class Token(Struct, frozen=True):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(Struct, frozen=True):
    id: int
    text: str
    logprob: float | None


class BestOfSequence(Struct, frozen=True, kw_only=True):
    """An answer that another one of `best_of` was better than."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET
    stop_reason: str | int | UnsetType = UNSET


class Details(Struct, frozen=True, kw_only=True):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET
    stop_reason: str | int | UnsetType = UNSET  # ours: which stop string or stop id matched


class GenerateResponse(Struct, frozen=True):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct, frozen=True, kw_only=True):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int
    stop_reason: str | int | UnsetType = UNSET


class StreamEvent(Struct, frozen=True, kw_only=True):
    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None
    details: StreamDetails | None


class TokenSlice(Struct, frozen=True):
    """One token of /tokenize: where it lies in the UTF-8 bytes of the input."""

    id: int
    text: str
    start: int
    stop: int
