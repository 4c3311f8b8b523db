"""What differs between TGI's routes and OpenAI's in the rules for one and the same request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Door:
    inputs: str  # what the route calls its prompt, in messages and as `param`
    max_new_tokens: str
    top_n_tokens: str
    prompt_logprobs: str
    granted_top_n: int  # alternatives that a request may ask for, even if the operator's limit is lower
    include_stop: bool  # does the text keep the stop string, when the request does not say
    raw_logprobs: bool  # logprobs before processors and warpers
    cut_to_fit: bool  # an answer longer than the context: cut, or refused
    zero_temperature: bool  # 0 means greedy, instead of being refused
    add_special_tokens: bool  # the tokenizer's own (BOS); a chat template writes them itself


NATIVE = Door(
    inputs="inputs",
    max_new_tokens="max_new_tokens",
    top_n_tokens="top_n_tokens",
    prompt_logprobs="decoder_input_details",
    granted_top_n=0,
    include_stop=True,
    raw_logprobs=False,
    cut_to_fit=True,
    zero_temperature=False,
    add_special_tokens=True,
)

CHAT = Door(
    inputs="messages",
    max_new_tokens="max_tokens",
    top_n_tokens="top_logprobs",
    prompt_logprobs="prompt_logprobs",
    granted_top_n=20,
    include_stop=False,
    raw_logprobs=True,
    cut_to_fit=False,
    zero_temperature=True,
    add_special_tokens=False,
)

COMPLETIONS = Door(
    inputs="prompt",
    max_new_tokens="max_tokens",
    top_n_tokens="logprobs",
    prompt_logprobs="echo",
    granted_top_n=5,
    include_stop=False,
    raw_logprobs=True,
    cut_to_fit=False,
    zero_temperature=True,
    add_special_tokens=True,
)
