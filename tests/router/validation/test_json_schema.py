"""Every keyword is enforced or refused, seen at the texts that the grammar lets pass."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator

from tests.fakes.grammars import accepts, spelled, write
from tests.fakes.schemas import CASES, KEYWORDS_2020_12, SchemaCase, random_schema
from tests.fakes.tokenizer import byte_tokenizer
from tgi.router.validation.grammar import prepare_schema
from tgi.router.validation.grammar_checker import Engine
from tgi.shard_client.messages import Grammar

ENGINE = Engine(byte_tokenizer())
MAX_TOKENS = 600


def check(schema: Any) -> Grammar | str:
    return ENGINE.check("json_schema", json.dumps(schema))


def grammar_of(schema: Any) -> Grammar:
    grammar = check(schema)
    assert isinstance(grammar, Grammar), grammar
    return grammar


def assert_written_is_valid(schema: Any, grammar: Grammar, rng: Random, times: int) -> int:
    """-> how many of the texts came to their end"""
    ended = 0
    for _ in range(times):
        text = write(grammar, rng, MAX_TOKENS, hurry=rng.choice((0.2, 0.6, 0.9)))
        if text is not None:
            ended += 1
            Draft202012Validator(schema).validate(json.loads(text))
    return ended


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.keyword}-{spelled(case.schema)[:50]}")
@pytest.mark.fault("llama.cpp#24097")
def test_a_keyword_is_enforced_or_refused_by_name(case: SchemaCase) -> None:
    found = check(case.schema)
    if case.refused is not None:
        assert isinstance(found, str)
        assert case.refused in found
        return
    assert isinstance(found, Grammar), found
    for instance in case.valid:
        assert accepts(found, spelled(instance)), instance
    for instance in case.invalid:
        assert not accepts(found, spelled(instance)), instance
    if not _has_old_items(case.schema):
        for instance in case.valid:
            Draft202012Validator(case.schema).validate(instance)
        assert assert_written_is_valid(case.schema, found, Random(1), times=6)


def _has_old_items(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("items"), list)


@pytest.mark.parametrize("case", [case for case in CASES if case.refused is None], ids=lambda case: case.keyword)
def test_a_prepared_schema_can_be_part_of_another(case: SchemaCase) -> None:
    prepared = json.loads(prepare_schema(case.schema, "tools"))
    del prepared["x-guidance"]
    definitions = prepared.pop("$defs", {})
    again = grammar_of({"type": "array", "items": prepared, "minItems": 1, "$defs": definitions})
    assert [value for value in case.valid if not accepts(again, spelled([value]))] == []
    assert [value for value in case.invalid if accepts(again, spelled([value]))] == []


def test_the_table_knows_every_keyword_of_the_specification() -> None:
    assert {case.keyword for case in CASES} >= KEYWORDS_2020_12


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.fault("llama.cpp#24097")
def test_a_random_schema_is_enforced_or_refused(seed: int) -> None:
    rng = Random(seed)
    schema = random_schema(rng)
    found = check(schema)
    if isinstance(found, Grammar):
        assert_written_is_valid(schema, found, rng, times=4)


def test_most_random_schemas_are_enforced() -> None:
    assert sum(isinstance(check(random_schema(Random(seed))), Grammar) for seed in range(100)) >= 70


@pytest.mark.soak
@pytest.mark.parametrize(
    "seeds", [range(start, start + 100) for start in range(60, 3_060, 100)], ids=lambda seeds: seeds[0]
)
def test_many_random_schemas_are_enforced_or_refused(seeds: range) -> None:
    for seed in seeds:
        test_a_random_schema_is_enforced_or_refused(seed)
