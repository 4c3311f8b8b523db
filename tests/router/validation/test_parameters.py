from __future__ import annotations

import re
from typing import Any

import pytest

from tgi.errors import InvalidRequest
from tgi.router.schema.generate import GenerateParameters
from tgi.router.validation.door import CHAT, NATIVE, Door
from tgi.router.validation.parameters import (
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    Limits,
    check_parameters,
    check_streaming,
    is_sampling,
    sampling_of,
    stopping_of,
)
from tgi.shard_client.messages import Sampling

LIMITS = Limits(max_input_tokens=100, max_total_tokens=200, vocab_size=300)

# One wrong value each, in TGI's order: whatever comes first in this list is told first.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"frequency_penalty": -2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"presence_penalty": 2.1}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.01}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"min_p": 1.5}, "`min_p` must be >= 0.0 and <= 1.0"),
    ({"min_p": -0.5}, "`min_p` must be >= 0.0 and <= 1.0"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop_token_ids": [1] * 65}, f"`stop_token_ids` supports up to {MAX_STOP_TOKEN_IDS} ids. Given: 65"),
    ({"stop_token_ids": [300]}, "`stop_token_ids` must be below the size of the vocabulary, 300. Given: 300"),
    ({"seed": -1}, "`seed` must be >= 0 and < 2^64. Given: -1"),
    ({"seed": 2**64}, f"`seed` must be >= 0 and < 2^64. Given: {2**64}"),
    ({"logit_bias": [1.0]}, "`logit_bias` must be an object that maps token ids to numbers, not a list"),
    ({"logit_bias": {"300": 1.0}}, "`logit_bias` must name token ids >= 0 and < 300. Given: '300'"),
    ({"logit_bias": {"-1": 1.0}}, "`logit_bias` must name token ids >= 0 and < 300. Given: '-1'"),
    ({"logit_bias": {"\u0665": 1.0}}, "`logit_bias` must name token ids >= 0 and < 300. Given: '\u0665'"),
    ({"logit_bias": {"a" * 99: 1.0}}, f"`logit_bias` must name token ids >= 0 and < 300. Given: '{'a' * 40}'"),
    ({"logit_bias": {"5": 100.5}}, "`logit_bias` must have values >= -100 and <= 100. Given: 100.5 for 5"),
    (
        {"logit_bias": {f"{token:09}": 1.0 for token in range(MAX_LOGIT_BIAS + 1)}},
        "`logit_bias` supports up to 1024 token ids. Given: 1025",
    ),
    ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "`bad_words` supports up to 128 words. Given: 129"),
    ({"bad_words": ["a", ""]}, "`bad_words` must not hold an empty string, nor one of blanks alone"),
    ({"bad_words": ["  "]}, "`bad_words` must not hold an empty string, nor one of blanks alone"),
    (
        {"bad_words": ["a" * (MAX_BAD_WORD + 1)]},
        f"`bad_words` supports words of up to 256 characters. Given: '{'a' * 40}' of 257",
    ),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    (
        {"decoder_input_details": True},
        "`decoder_input_details` needs a server that was started with `--enable-prefill-logprobs`, and a model that is "
        "no encoder-decoder",
    ),
    (
        {"adapter_id": "mine"},
        "`adapter_id` names an adapter that is not loaded: 'mine'; leave it out to use the base model",
    ),
]


def refusal(values: dict[str, Any], door: Door = NATIVE, limits: Limits = LIMITS) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_parameters(GenerateParameters(**values), door, limits)
    assert caught.value.param in values or caught.value.param in (door.max_new_tokens, door.top_n_tokens)
    return str(caught.value)


@pytest.mark.parametrize(("values", "text"), WRONG)
@pytest.mark.row("A: Error JSON, error types and statuses")
@pytest.mark.fault("vllm#54195")
@pytest.mark.fault("vllm#16529")
def test_a_wrong_value_is_refused_in_tgis_words(values: dict[str, Any], text: str) -> None:
    assert refusal(values) == text


@pytest.mark.parametrize("index", range(len(WRONG) - 1))
def test_the_first_wrong_value_wins_in_tgis_order(index: int) -> None:
    values, text = WRONG[index]
    for other, _ in WRONG[index + 1 :]:
        if not set(other) & set(values):
            # Setting a sampling parameter at all satisfies best_of's need for sampling.
            if "best_of" in values and set(other) & {"temperature", "top_k", "top_p", "typical_p", "min_p"}:
                continue
            assert refusal({**other, **values}) == text


@pytest.mark.parametrize("sampling", [{"do_sample": True}, {"temperature": 1.0}, {"min_p": 0.1}])
def test_best_of_needs_sampling_and_no_seed(sampling: dict[str, Any]) -> None:
    check_parameters(GenerateParameters(best_of=2, **sampling), NATIVE, LIMITS)
    assert refusal({"best_of": 2, "temperature": 1.0, "seed": 1}) == "`seed` must not be set when `best_of` > 1"
    only_one = Limits(100, 200, 300, max_best_of=1)
    assert refusal({"best_of": 2}, limits=only_one) == "`best_of` != 1 is not allowed for this endpoint"


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [1e39, -1e39])
def test_what_float32_cannot_hold_is_refused(name: str, value: float) -> None:
    assert refusal({name: value}) == f"`{name}` is too large for a 32-bit number"


@pytest.mark.parametrize(
    "values",
    [
        {"best_of": 1},
        {"best_of": 0},
        {"temperature": 1.0},
        {"repetition_penalty": 1.0},
        {"frequency_penalty": 0.0, "presence_penalty": 0.0},
        {"top_p": 1.0, "typical_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"watermark": False, "decoder_input_details": False, "adapter_id": "", "logit_bias": {}},
        {"logit_bias": []},
        {"bad_words": []},
        {"logit_bias": {"5": 0.0}},
        {"stop": [], "stop_token_ids": [], "top_n_tokens": 0},
    ],
)
def test_neutral_values_are_accepted_and_stay_neutral(values: dict[str, Any]) -> None:
    parameters = GenerateParameters(**values)
    check_parameters(parameters, NATIVE, LIMITS)
    assert sampling_of(parameters, NATIVE, LIMITS, lambda: 9) == Sampling(seed=9)


@pytest.mark.parametrize("values", [{}, {"best_of": 1}, {"decoder_input_details": False}])
def test_streams_take_what_tgi_streams(values: dict[str, Any]) -> None:
    check_streaming(GenerateParameters(**values))


@pytest.mark.parametrize("best_of", [0, 2])
def test_streams_refuse_any_best_of_but_one(best_of: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^`best_of` != 1 is not supported when streaming tokens$"):
        check_streaming(GenerateParameters(best_of=best_of))


@pytest.mark.parametrize(
    ("values", "native", "chat"),
    [
        ({}, False, False),
        ({"do_sample": True}, True, True),
        ({"do_sample": False}, False, False),
        ({"do_sample": False, "temperature": 0.7}, True, True),
        ({"temperature": 1.0}, False, False),
        ({"top_k": 5}, True, True),
        ({"top_p": 0.9}, True, True),
        ({"min_p": 0.1}, True, True),
        ({"do_sample": True, "temperature": 0.0}, True, False),
    ],
)
@pytest.mark.row("A: Sampling: temperature, top_k, top_p, typical_p, do_sample, seed")
def test_who_samples(values: dict[str, Any], native: bool, chat: bool) -> None:
    parameters = GenerateParameters(**values)
    assert is_sampling(parameters, NATIVE) is native
    assert is_sampling(parameters, CHAT) is chat


PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "frequency_penalty": -0.5,
    "presence_penalty": 2.0,
    "watermark": True,
    "logit_bias": {"5": -100.0, "299": 0.5, "07": 100.0},
}
BIAS = ((5, -100.0), (299, 0.5), (7, 100.0))


@pytest.mark.fault("TGI#1439")
@pytest.mark.fault("TGI#2869")
def test_sampling_values_reach_the_shard() -> None:
    warpers = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8}
    parameters = GenerateParameters(seed=2**64 - 1, **warpers, **PROCESSORS)
    check_parameters(parameters, NATIVE, LIMITS)
    expected = Sampling(do_sample=True, seed=2**64 - 1, **{**warpers, **PROCESSORS, "logit_bias": BIAS})
    assert sampling_of(parameters, NATIVE, LIMITS, lambda: 9) == expected
    assert sampling_of(parameters, CHAT, LIMITS, lambda: 9).raw_logprobs


@pytest.mark.parametrize("door", [NATIVE, CHAT])
def test_what_moves_the_best_token_holds_for_greedy_requests_and_leaves_them_greedy(door: Door) -> None:
    parameters = GenerateParameters(**PROCESSORS, temperature=0.0 if door is CHAT else None)
    check_parameters(parameters, door, LIMITS)
    expected = Sampling(seed=9, raw_logprobs=door.raw_logprobs, **{**PROCESSORS, "logit_bias": BIAS})
    assert sampling_of(parameters, door, LIMITS, lambda: 9) == expected
    assert not expected.do_sample


def test_a_tiny_repetition_penalty_cannot_overflow_the_logits() -> None:
    parameters = GenerateParameters(repetition_penalty=1e-46)
    check_parameters(parameters, NATIVE, LIMITS)
    assert sampling_of(parameters, NATIVE, LIMITS, lambda: 9).repetition_penalty == MIN_REPETITION_PENALTY


def test_a_top_k_of_the_whole_vocabulary_is_none() -> None:
    parameters = GenerateParameters(do_sample=True, top_k=2**31 - 1)
    assert sampling_of(parameters, NATIVE, LIMITS, lambda: 9).top_k == 0


def test_a_tiny_temperature_cannot_overflow_the_logits() -> None:
    parameters = GenerateParameters(temperature=1e-45)
    check_parameters(parameters, NATIVE, LIMITS)
    assert sampling_of(parameters, NATIVE, LIMITS, lambda: 9).temperature == MIN_TEMPERATURE


def test_the_same_request_without_a_seed_draws_one_each_time() -> None:
    seeds = iter([11, 12])
    drawn = [sampling_of(GenerateParameters(), NATIVE, LIMITS, lambda: next(seeds)).seed for _ in range(2)]
    assert drawn == [11, 12]


@pytest.mark.fault("vllm#1973")
def test_who_keeps_the_stop_string() -> None:
    silent = GenerateParameters(stop=["x"])
    assert stopping_of(silent, NATIVE, 5).include_stop
    assert not stopping_of(silent, CHAT, 5).include_stop
    for door in (NATIVE, CHAT):
        for asked in (True, False):
            parameters = GenerateParameters(stop=["x"], include_stop_str_in_output=asked)
            assert stopping_of(parameters, door, 5).include_stop is asked


def test_stops_are_told_once_and_without_the_empty_one() -> None:
    stopping = stopping_of(GenerateParameters(stop=["b", "", "a", "b"], stop_token_ids=[4, 2, 4]), NATIVE, 5)
    assert stopping.stop_strings == ("b", "a")
    assert stopping.stop_ids == (4, 2)


@pytest.mark.parametrize("name", ["ignore_eos", "ignore_eos_token"])
def test_end_of_text_may_be_ignored_under_either_name(name: str) -> None:
    assert stopping_of(GenerateParameters(**{name: True}), CHAT, 5).ignore_eos
    assert not stopping_of(GenerateParameters(**{name: False}), CHAT, 5).ignore_eos


@pytest.mark.fault("llama.cpp#7381")
@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (2**64 - 1, 2**64 - 1), (None, 9)])
def test_every_seed_counts_and_one_is_drawn_where_there_is_none(seed: int | None, expected: int) -> None:
    for do_sample in (False, True):
        parameters = GenerateParameters(seed=seed, do_sample=do_sample)
        assert sampling_of(parameters, NATIVE, LIMITS, lambda: 9).seed == expected


def test_min_tokens_within_the_answer() -> None:
    assert stopping_of(GenerateParameters(min_tokens=5), NATIVE, 5).min_new_tokens == 5
    text = "`min_tokens` must be <= `max_tokens`, here 5. Given: 6"
    with pytest.raises(InvalidRequest, match=f"^{re.escape(text)}$"):
        stopping_of(GenerateParameters(min_tokens=6), CHAT, 5)
