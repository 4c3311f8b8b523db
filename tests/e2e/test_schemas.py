"""JSON schemas through the whole server: what comes out is valid or was refused by name, whichever way it was asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from benchmarks.server_process import Server
from tests.e2e.client import Client
from tests.e2e.doors import (
    CHAT,
    COMPLETION,
    GENERATE,
    REFUSED,
    REQUIRED,
    Door,
    Told,
    ask,
    in_an_object,
    verdict,
)
from tests.e2e.servers import LocalRouter, local_server
from tests.e2e.workload import at_once, random_text
from tests.fakes.schemas import CASES, SchemaCase, random_schema
from tests.fakes.tiny_model import SPECIAL, write_tiny_llama

pytestmark = pytest.mark.slow

AT_ONCE = 16
MOST_TOKENS = 500
DOORS = (CHAT, GENERATE, COMPLETION, REQUIRED)
# Of the requests: a schema of six is refused, and an answer of eight is cut.
LEAST_COMPLETE = 0.6
# A random model seldom finds the end of a string by itself.
CLOSING = {str(len(SPECIAL) + ord('"')): 5.0}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRouter]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model"), seed=5, max_position=8192)
    # A template without tools has their schemas in the prompt, about a token a character.
    with local_server(model, max_total_tokens=8192) as router:
        yield router


def random_sampling(rng: Random) -> dict[str, Any]:
    """Hot enough for the model to write anything that it may."""
    found = {"temperature": rng.choice((0.7, 1.0, 1.5)), "seed": rng.randrange(2**63), "logit_bias": CLOSING}
    if rng.random() < 0.2:
        found["top_p"] = 0.9
    return found


async def ask_all(router: LocalRouter, asked: Sequence[tuple[Door, Any]], seed: int = 0) -> list[Told]:
    """Answers in the order of `asked`, `AT_ONCE` of them written at a time. Afterwards nothing of them is left."""

    async with Client(router.url) as client:

        async def one(index: int, door: Door, schema: Any) -> Told:
            rng = Random(f"{seed}/{index}")
            return await ask(client, door, random_text(rng, 12), schema, MOST_TOKENS, **random_sampling(rng))

        told = await at_once(AT_ONCE, [lambda i=i, a=a: one(i, *a) for i, a in enumerate(asked)])
    await router.idle()
    return told


def assert_enforced_or_refused(router: LocalRouter, seeds: range) -> None:
    asked = [(DOORS[seed % len(DOORS)], random_schema(Random(seed))) for seed in seeds]
    asked = [(door, in_an_object(schema) if door is REQUIRED else schema) for door, schema in asked]
    told = router.run(ask_all(router, asked, seeds.start), timeout_s=3000)
    counts = Counter((door.name, verdict(schema, one)) for (door, schema), one in zip(asked, told))
    for name in (door.name for door in DOORS):
        print(name, *(f"{counts[name, word]} {word}," for word in ("complete", "cut", "refused")))
    complete = [counts[door.name, "complete"] for door in DOORS]
    assert sum(complete) >= LEAST_COMPLETE * len(seeds), counts
    assert min(complete) >= LEAST_COMPLETE / 2 * len(seeds) / len(DOORS), counts


@pytest.mark.fault("llama.cpp#24097")
@pytest.mark.row("A: grammar", "B: response_format, both forms", "B: tools, tool_choice, tool_prompt")
def test_random_schemas_are_enforced_or_refused(router: LocalRouter) -> None:
    assert_enforced_or_refused(router, range(60))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_schemas_are_enforced_or_refused(router: LocalRouter) -> None:
    assert_enforced_or_refused(router, range(60, 360))


def knows_draft(schema: Any) -> bool:
    """Is it one of draft 2020-12? What it means is told by jsonschema."""
    return not (isinstance(schema, dict) and isinstance(schema.get("items"), list))


@pytest.mark.fault("llama.cpp#24097", "vllm#12201", "vllm#12028", "llguidance#265", "xgrammar#192", "llama.cpp#27619")
def test_each_keyword_is_enforced_or_refused_by_name(router: LocalRouter) -> None:
    asked = [(door, case) for case in CASES if knows_draft(case.schema) for door in doors_of(case)]
    told = router.run(ask_all(router, [(door, case.schema) for door, case in asked]))
    verdicts: dict[str, set[str]] = {}
    for (door, case), one in zip(asked, told):
        if case.refused is not None:
            assert one.status in REFUSED, (door.name, case, one)
            assert case.refused in one.refusal, (door.name, case)
        else:
            found = verdict(case.schema, one)
            assert found != "refused", (door.name, case, one)
            verdicts.setdefault(json.dumps(case.schema), set()).add(found)
    never = [schema for schema, found in verdicts.items() if "complete" not in found]
    print(f"{len(asked)} requests, {len(verdicts)} schemas enforced, never completed: {never}")
    assert len(never) <= 0.1 * len(verdicts)


@pytest.mark.fault("llama.cpp#25746")
def test_long_strings(router: LocalRouter) -> None:
    inner = {"b": {"type": "string", "maxLength": 2_000}, "c": {"type": "string", "minLength": 40, "maxLength": 1_500}}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": inner, "required": ["b", "c"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    told = router.run(ask_all(router, [(door, schema) for door in DOORS for _ in range(2)]))
    assert [verdict(schema, one) for one in told].count("complete") >= 6


def doors_of(case: SchemaCase) -> list[Door]:
    """The arguments of a tool are an object."""
    is_object = isinstance(case.schema, dict) and case.schema.get("type") == "object"
    return [CHAT, GENERATE, *([REQUIRED] if is_object else [COMPLETION])]


# With the real model.

NAME = {"type": "string", "minLength": 1, "maxLength": 60}
REAL: list[tuple[str, dict[str, Any]]] = [
    (
        "Invent a person who lives in Paris.",
        {
            "type": "object",
            "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "city": NAME},
            "required": ["name", "age", "city"],
        },
    ),
    (
        "Give me a recipe for pancakes with at most five steps.",
        {
            "type": "object",
            "properties": {
                "title": NAME,
                "steps": {"type": "array", "items": NAME, "minItems": 2, "maxItems": 5},
                "minutes": {"type": "number", "exclusiveMinimum": 0, "maximum": 600},
            },
            "required": ["title", "steps", "minutes"],
            "additionalProperties": False,
        },
    ),
    (
        "Which planets do you know? Tell whether each is a gas giant.",
        {
            "type": "array",
            "items": {"$ref": "#/$defs/planet"},
            "minItems": 1,
            "maxItems": 4,
            "$defs": {
                "planet": {
                    "type": "object",
                    "properties": {
                        "name": NAME,
                        "gas": {"type": "boolean"},
                        "moons": {"enum": ["none", "one", "many"]},
                    },
                    "required": ["name", "gas"],
                }
            },
        },
    ),
]


@pytest.mark.real_model
@pytest.mark.row("B: response_format, both forms")
def test_the_real_models_answers_end_by_themselves(bundled_server: Server) -> None:
    asked = [
        (door, prompt, schema, temperature)
        for door in (CHAT, GENERATE)
        for prompt, schema in REAL
        for temperature in (0 if door is CHAT else None, 1.0)
    ]

    async def run() -> list[Told]:
        async with Client(bundled_server.url) as client:
            jobs = [
                lambda d=door, p=prompt, s=schema, t=temperature: ask(client, d, p, s, 400, temperature=t, seed=1)
                for door, prompt, schema, temperature in asked
            ]
            return await at_once(len(jobs), jobs)

    for (_, _, schema, _), told in zip(asked, asyncio.run(run())):
        assert verdict(schema, told) == "complete", told
        # Pretty JSON at most.
        assert len(told.text) <= 3 * len(json.dumps(json.loads(told.text), ensure_ascii=False, indent=1)), told
