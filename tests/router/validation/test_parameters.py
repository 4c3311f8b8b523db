from __future__ import annotations

import re
from typing import Any

import pytest

from tgi.errors import InvalidRequest
from tgi.router.schema.generate import GenerateParameters
from tgi.router.validation.door import CHAT, NATIVE, Door
from tgi.router.validation.parameters import (
    MAX_STOP_TOKEN_IDS,
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
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"repetition_penalty": 1.1}, "`repetition_penalty` is not supported by this server; leave it out"),
    ({"frequency_penalty": 0.5}, "`frequency_penalty` is not supported by this server; leave it out"),
    ({"presence_penalty": 0.5}, "`presence_penalty` is not supported by this server; leave it out"),
    ({"typical_p": 0.9}, "`typical_p` is not supported by this server; leave it out"),
    ({"watermark": True}, "`watermark` is not supported by this server; leave it out"),
    ({"logit_bias": {"5": -100.0}}, "`logit_bias` is not supported by this server; leave it out"),
    ({"decoder_input_details": True}, "`decoder_input_details` is not supported by this server; leave it out"),
    ({"grammar": {"type": "regex", "value": "a"}}, "grammar is not supported"),
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
def test_a_wrong_value_is_refused_in_tgis_words(values: dict[str, Any], text: str) -> None:
    assert refusal(values) == text


@pytest.mark.parametrize("index", range(len(WRONG) - 1))
def test_the_first_wrong_value_wins_in_tgis_order(index: int) -> None:
    values, text = WRONG[index]
    for other, _ in WRONG[index + 1 :]:
        if not set(other) & set(values):
            # Setting a sampling parameter at all satisfies best_of's need for sampling.
            if "best_of" in values and set(other) & {"temperature", "top_k", "top_p", "typical_p"}:
                continue
            assert refusal({**other, **values}) == text


def test_best_of_passes_tgis_checks_and_is_then_refused() -> None:
    assert refusal({"best_of": 2, "do_sample": True}) == "`best_of` is not supported by this server; leave it out"
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


@pytest.mark.fault("TGI#1439")
def test_sampling_values_reach_the_shard() -> None:
    parameters = GenerateParameters(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, seed=2**64 - 1)
    check_parameters(parameters, NATIVE, LIMITS)
    expected = Sampling(
        do_sample=True, temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, seed=2**64 - 1, raw_logprobs=False
    )
    assert sampling_of(parameters, NATIVE, LIMITS, lambda: 9) == expected
    assert sampling_of(parameters, CHAT, LIMITS, lambda: 9).raw_logprobs


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


def test_min_tokens_within_the_answer() -> None:
    assert stopping_of(GenerateParameters(min_tokens=5), NATIVE, 5).min_new_tokens == 5
    text = "`min_tokens` must be <= `max_tokens`, here 5. Given: 6"
    with pytest.raises(InvalidRequest, match=f"^{re.escape(text)}$"):
        stopping_of(GenerateParameters(min_tokens=6), CHAT, 5)
