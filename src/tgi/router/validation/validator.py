"""What a request asks for -> ValidRequest: checks, tokenises, fills the defaults. Knows no HTTP, nor who serves it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tgi.errors import InvalidRequest
from tgi.router.schema.generate import GenerateParameters
from tgi.router.validation.bad_words import encode_bad_words
from tgi.router.validation.door import Door
from tgi.router.validation.encoder import Encoder
from tgi.router.validation.grammar import GrammarWish, native_grammar
from tgi.router.validation.lengths import LengthRule, check_truncate, max_new_tokens
from tgi.router.validation.parameters import (
    Limits,
    check_parameters,
    check_streaming,
    sampling_of,
    stopping_of,
)
from tgi.router.validation.request import ValidRequest
from tgi.shard_client.messages import Grammar

_ID_BYTES = 4


class GrammarCheck(Protocol):
    """Grammars, off the event loop (`grammar_checker`)."""

    async def check(self, wish: GrammarWish) -> Grammar: ...


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as its door understood it, not yet checked."""

    inputs: str
    parameters: GenerateParameters
    door: Door
    is_streaming: bool = False
    received_at: float = 0.0  # time.perf_counter()
    traceparent: str = ""  # W3C trace context
    prompt_ids: bytes | None = None  # u32: instead of `inputs`, where the client sent token ids
    grammar: GrammarWish | None = None  # instead of `parameters.grammar`
    client: str = ""  # see ValidRequest


def random_seed() -> int:
    return secrets.randbits(64)


class Validator:
    def __init__(
        self,
        encoder: Encoder,
        limits: Limits,
        tokenizer_vocab_size: int,
        draw_seed: Callable[[], int] = random_seed,
        grammars: GrammarCheck | None = None,
    ) -> None:
        """Without `grammars` a request for one is refused."""
        self._encoder = encoder
        self.limits = limits
        self._grammars = grammars
        self._draw_seed = draw_seed
        # Only a tokenizer with more ids than the model has rows can write an id that hurts the device.
        self._ids_may_exceed = tokenizer_vocab_size > limits.vocab_size

    async def validate(self, wish: Wish) -> ValidRequest:
        """Raises InvalidRequest, ContextTooLong among it, for the first thing that is wrong."""
        parameters, door, limits = wish.parameters, wish.door, self.limits
        if wish.is_streaming:
            check_streaming(parameters)
        check_parameters(parameters, door, limits)
        if not (wish.inputs if wish.prompt_ids is None else wish.prompt_ids):
            raise InvalidRequest(f"`{door.inputs}` cannot be empty", door.inputs)
        rule = self._length_rule(door)
        check_truncate(parameters.truncate, rule)
        prompt_ids = wish.prompt_ids
        if prompt_ids is None:
            prompt_ids = await self._encode(wish.inputs, door)
        if parameters.truncate is not None:
            prompt_ids = prompt_ids[-parameters.truncate * _ID_BYTES :]
        if not prompt_ids:
            raise InvalidRequest(f"`{door.inputs}` has no tokens", door.inputs)
        room = max_new_tokens(len(prompt_ids) // _ID_BYTES, parameters.max_new_tokens, rule)
        stopping = stopping_of(parameters, door, room)
        if self._ids_may_exceed or wish.prompt_ids is not None:
            self._check_vocabulary(prompt_ids, door)
        bad_words = await encode_bad_words(parameters.bad_words or (), self._encoder, limits.vocab_size)
        grammar = await self._grammar(wish)
        return ValidRequest(
            prompt_ids=prompt_ids,
            sampling=sampling_of(parameters, door, limits, self._draw_seed, bad_words),
            stopping=stopping,
            top_n=parameters.top_n_tokens or 0,
            prompt_logprobs=bool(parameters.decoder_input_details),
            grammar=grammar,
            priority=parameters.priority or 0,
            client=wish.client,
            use_cache=parameters.cache is not False,
            cache_salt=parameters.cache_salt or "",
            traceparent=wish.traceparent,
            received_at=wish.received_at,
        )

    def check(self, parameters: GenerateParameters, door: Door) -> None:
        """What can be said without a prompt. Raises InvalidRequest."""
        check_parameters(parameters, door, self.limits)
        check_truncate(parameters.truncate, self._length_rule(door))

    def _length_rule(self, door: Door) -> LengthRule:
        limits = self.limits
        return LengthRule(
            limits.max_input_tokens, limits.max_total_tokens, door.inputs, door.max_new_tokens, door.cut_to_fit
        )

    async def _encode(self, text: str, door: Door) -> bytes:
        try:
            return (await self._encoder.encode(text, door.add_special_tokens)).ids
        except InvalidRequest as error:
            error.param = door.inputs  # the tokenizer does not know what the route calls its prompt
            raise

    async def _grammar(self, wish: Wish) -> Grammar | None:
        asked = wish.grammar
        if asked is None and wish.parameters.grammar is not None:
            asked = native_grammar(wish.parameters.grammar)
        if asked is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("grammar is not supported", asked.param)
        return await self._grammars.check(asked)

    def _check_vocabulary(self, prompt_ids: bytes, door: Door) -> None:
        largest = max(memoryview(prompt_ids).cast("I"))
        if largest >= self.limits.vocab_size:
            raise InvalidRequest(
                f"`{door.inputs}` has the token id {largest}, but the model knows ids below {self.limits.vocab_size}",
                door.inputs,
            )
