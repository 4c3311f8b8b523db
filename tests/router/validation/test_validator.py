from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.tokenizer import BOS_ID, byte_tokenizer, ids_of, unpacked
from tgi.errors import ContextTooLong, InvalidRequest
from tgi.router.schema.generate import GenerateParameters
from tgi.router.validation.door import CHAT, NATIVE, Door
from tgi.router.validation.grammar import GrammarWish
from tgi.router.validation.parameters import Limits
from tgi.router.validation.request import ValidRequest
from tgi.router.validation.validator import Validator, Wish, random_seed
from tgi.shard_client.messages import Grammar
from tgi.text.tokenizer import Encoding

LIMITS = Limits(max_input_tokens=20, max_total_tokens=30, vocab_size=300)
TOKENIZER = byte_tokenizer()


class AddsBos:
    """An encoder on the spot, which adds BOS where special tokens are wanted."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        encoding = TOKENIZER.encode(text)
        if add_special_tokens:
            encoding.ids = BOS_ID.to_bytes(4, "little") + encoding.ids
        return encoding


def validate(text: str, door: Door = NATIVE, limits: Limits = LIMITS, **values: Any) -> ValidRequest:
    validator = Validator(AddsBos(), limits, TOKENIZER.vocab_size, draw_seed=lambda: 77)
    streaming = values.pop("is_streaming", False)
    wish = Wish(text, GenerateParameters(**values), door, streaming, received_at=3.5, traceparent="00-1")
    return asyncio.run(validator.validate(wish))


def test_defaults_are_filled_in() -> None:
    request = validate("hello")
    assert unpacked(request.prompt_ids) == [BOS_ID, *ids_of("hello")]
    assert request.stopping.max_new_tokens == 30 - 6
    assert request.sampling.seed == 77
    assert (request.top_n, request.priority, request.use_cache, request.cache_salt) == (0, 0, True, "")
    assert (request.received_at, request.traceparent) == (3.5, "00-1")


@pytest.mark.fault("sglang#888", "TGI#3203")
def test_a_chat_prompt_gets_no_second_bos() -> None:
    assert unpacked(validate("hello", CHAT).prompt_ids) == ids_of("hello")


@pytest.mark.parametrize("door", [NATIVE, CHAT])
def test_a_text_that_is_no_unicode_is_blamed_on_the_field_that_brought_it(door: Door) -> None:
    """A template can make one: of an escape within the JSON text of a call's arguments."""
    with pytest.raises(InvalidRequest, match="lone surrogate") as raised:
        validate("\ud800", door)
    assert raised.value.param == door.inputs


@pytest.mark.fault("TGI#189")
def test_truncate_keeps_the_last_tokens_and_the_lengths_follow() -> None:
    request = validate("a" * 500 + "tail", truncate=4)
    assert unpacked(request.prompt_ids) == ids_of("tail")
    assert request.num_prompt_tokens == 4
    assert request.stopping.max_new_tokens == 26


@pytest.mark.parametrize("door", [NATIVE, CHAT])
@pytest.mark.parametrize("do_sample", [False, True])
def test_bad_words_reach_the_shard_as_ids_without_bos(door: Door, do_sample: bool) -> None:
    request = validate("hello", door, bad_words=["no", "nope"], do_sample=do_sample)
    assert request.sampling.bad_words == (tuple(ids_of("no")), tuple(ids_of("nope")))


@pytest.mark.fault("llama.cpp#4288")
def test_what_the_scheduler_needs_goes_through() -> None:
    request = validate("hello", top_n_tokens=3, priority=-2, cache=False, cache_salt="tenant", max_new_tokens=7)
    assert (request.top_n, request.priority, request.use_cache, request.cache_salt) == (3, -2, False, "tenant")
    assert request.stopping.max_new_tokens == 7


def test_parameters_are_checked_before_the_text_and_the_text_before_truncate() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        validate("", temperature=0.0)
    with pytest.raises(InvalidRequest, match=r"^`inputs` cannot be empty$"):
        validate("", truncate=0)
    with pytest.raises(InvalidRequest, match="truncate"):
        validate("a" * 50, truncate=0)
    with pytest.raises(ContextTooLong):
        validate("a" * 50, min_tokens=100)
    with pytest.raises(InvalidRequest, match=r"^`best_of` != 1 is not supported when streaming"):
        validate("", best_of=2, temperature=0.0, is_streaming=True)


def test_an_empty_chat_is_blamed_on_its_messages() -> None:
    with pytest.raises(InvalidRequest, match=r"^`messages` cannot be empty$") as caught:
        validate("", CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(("vocab_size", "fits"), [(257, True), (256, False)])
def test_a_token_that_the_model_does_not_have_never_reaches_it(vocab_size: int, fits: bool) -> None:
    limits = Limits(max_input_tokens=20, max_total_tokens=30, vocab_size=vocab_size)
    if fits:
        validate("hello", limits=limits)
    else:
        with pytest.raises(InvalidRequest, match="`inputs` has the token id 256, but the model knows ids below 256"):
            validate("hello", limits=limits)


@pytest.mark.fault("vllm#1211")
def test_drawn_seeds_differ_and_are_u64() -> None:
    seeds = {random_seed() for _ in range(64)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) >= 2**60


class Echo:
    """Passes every grammar that is asked for."""

    async def check(self, wish: GrammarWish) -> Grammar:
        return Grammar(wish.kind, f"{wish.value} of {wish.param}")


def validate_grammar(inputs: str, wish: GrammarWish | None, grammars: Echo | None, **values: Any) -> Grammar | None:
    validator = Validator(AddsBos(), LIMITS, TOKENIZER.vocab_size, grammars=grammars)
    asked = Wish(inputs, GenerateParameters(**values), NATIVE, grammar=wish)
    return asyncio.run(validator.validate(asked)).grammar


REGEX = {"type": "regex", "value": "a"}


@pytest.mark.row("A: grammar")
def test_a_grammar_comes_from_the_door_or_from_the_parameters() -> None:
    wish = GrammarWish("lark", "x", "tools")
    assert validate_grammar("a", None, Echo()) is None
    assert validate_grammar("a", None, Echo(), grammar=REGEX) == Grammar("regex", "a of grammar")
    assert validate_grammar("a", wish, Echo(), grammar=REGEX) == Grammar("lark", "x of tools")


def test_without_grammar_support_a_grammar_is_refused_last() -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar is not supported$") as caught:
        validate_grammar("a", GrammarWish("regex", "a", "response_format"), None)
    assert caught.value.param == "response_format"
    with pytest.raises(ContextTooLong):
        validate_grammar("a" * 50, None, None, grammar=REGEX)
    with pytest.raises(InvalidRequest, match="must be one of `json`"):
        validate_grammar("a", None, Echo(), grammar={"type": "xml", "value": ""})
