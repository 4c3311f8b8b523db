"""What chats and text completions ask for in the same words -> the words of the native API, and the grammar."""

from __future__ import annotations

import asyncio

from tgi.router.schema.chat import ChatRequest
from tgi.router.schema.completions import CompletionRequest
from tgi.router.schema.generate import GenerateParameters
from tgi.router.validation.grammar import GrammarWish, guided_grammar, response_format_grammar

LEAST_TOP_P = 1e-9
"""OpenAI takes a `top_p` of 0: nothing but the likeliest token is left."""


def parameters_of(
    body: ChatRequest | CompletionRequest,
    priority: int | None,
    max_new_tokens: int | None,
    top_n_tokens: int | None,
    scores_prompt: bool = False,
) -> GenerateParameters:
    return GenerateParameters(
        temperature=body.temperature,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        top_k=body.top_k,
        top_p=LEAST_TOP_P if body.top_p == 0 else body.top_p,
        min_p=body.min_p,
        typical_p=body.typical_p,
        do_sample=True,
        max_new_tokens=max_new_tokens,
        min_tokens=body.min_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        bad_words=body.bad_words,
        stop_token_ids=body.stop_token_ids,
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        ignore_eos_token=body.ignore_eos_token,
        seed=_unsigned(body.seed),
        top_n_tokens=top_n_tokens,
        decoder_input_details=scores_prompt,
        logit_bias=body.logit_bias,
        priority=priority,
        cache=body.cache,
        cache_salt=body.cache_salt,
    )


def _unsigned(seed: int | None) -> int | None:
    """OpenAI's seeds are signed, of 64 bits: a negative one is the same bits."""
    return seed + 2**64 if seed is not None and -(2**63) <= seed < 0 else seed


def grammar_of(body: ChatRequest | CompletionRequest) -> GrammarWish | None:
    """Raises InvalidRequest, also where a request asks for more than one."""
    return guided_grammar(
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
        body.structured_outputs,
        None if body.response_format is None else response_format_grammar(body.response_format),
    )


async def grammar_aside(body: ChatRequest | CompletionRequest) -> GrammarWish | None:
    """As `grammar_of`, beside the event loop where schemas inside a grammar are read: that may take hundreds of
    milliseconds."""
    if body.guided_grammar is None and body.structured_outputs is None:
        return grammar_of(body)
    return await asyncio.to_thread(grammar_of, body)
