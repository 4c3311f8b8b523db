"""Grammars beside everything else that a server does: neighbours, preemption, hang-ups, other parameters."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator

from tests.e2e.client import Answer, Client
from tests.e2e.doors import CHAT, REFUSED, REQUIRED, ask, grammar_of, messages
from tests.e2e.servers import LocalRouter, local_server, until
from tests.e2e.test_hangup import Caller
from tests.e2e.workload import Comparison, Request, assert_whole, at_once, random_requests, random_text
from tests.fakes.grammars import begins
from tests.fakes.tiny_model import SPECIAL, write_tiny_llama
from tgi.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.row("A: grammar", "B: response_format, both forms")]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
MOST_TOKENS = 400  # SCHEMA's longest answers, blanks included, have about 250
LONG = {"type": "array", "items": {"type": "integer", "minimum": 1000, "maximum": 9999}, "minItems": 40, "maxItems": 45}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]( [A-Z][a-z]{2,8})?"
# In blocks of 64: answers to LONG take 5 of them or more.
POOL = 12 * 64
# Refused one by one, most of them after the engine has had some work with them.
MONSTERS: list[dict[str, Any]] = [
    {"type": "regex", "value": "(a{1000}){1000}"},
    {"type": "regex", "value": "a("},
    {"type": "regex", "value": "(" * 20_000 + "a" + ")" * 20_000},
    {"type": "json", "value": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(10)]}},
    {"type": "json", "value": {"properties": {str(i): {"maxLength": i} for i in range(2_001)}}},
    {"type": "json", "value": {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(150)]}},
    {"type": "json", "value": {"enum": []}},
    {"type": "json", "value": {"uniqueItems": True}},
]
# Passes the check, for a text begins that it allows; what it costs to go on is seen when it does.
COSTLY = {"type": "regex", "value": "(a|b|.*[a-z].{200}){20}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def router(model: Path) -> Iterator[LocalRouter]:
    with local_server(model, max_total_tokens=1024) as router:
        yield router


@pytest.fixture(scope="module")
def narrow_router(model: Path) -> Iterator[LocalRouter]:
    with local_server(model, max_batch_total_tokens=POOL, max_total_tokens=512) as router:
        yield router


def byte_id(letter: str) -> int:
    return len(SPECIAL) + ord(letter)


def held(schema: Any) -> dict[str, Any]:
    return {"type": "json", "value": schema}


def under_grammar(seed: int, schema: Any = SCHEMA, most: int = MOST_TOKENS, **more: Any) -> Request:
    """Hot, so that the model writes anything that it may."""
    parameters = {"grammar": held(schema), "max_new_tokens": most, "do_sample": True, "seed": seed}
    parameters |= more
    return Request("generate", random_text(Random(seed), 12), seed % 2 == 0, parameters)


def assert_valid(answer: Answer, schema: Any = SCHEMA) -> None:
    assert answer.finish == "eos_token", answer
    Draft202012Validator(schema).validate(json.loads(answer.text))


async def sent(router: LocalRouter, requests: list[Request], limit: int) -> list[Answer]:
    async with Client(router.url) as client:
        return await at_once(limit, [lambda r=request: r.send(client) for request in requests])


# In company.


def assert_undisturbed(router: LocalRouter, model: Path, plain: list[Request], schema: Any, limit: int) -> None:
    """As many requests with a grammar go between those of `plain`; each answer is what it is alone."""
    formed = [under_grammar(seed, schema, 450) for seed in range(len(plain))]
    mixed = [request for pair in zip(plain, formed) for request in pair]
    together, alone = router.run(sent(router, mixed, limit), 1500), router.run(sent(router, mixed, 1), 1500)
    comparison = Comparison(load_tokenizer(model))
    for request, found, expected in zip(plain, together[::2], alone[::2]):
        assert_whole(found, request)
        comparison.compare(found, expected, request)
    assert comparison.excused == 0
    assert [answer.told for answer in together[1::2]] == [answer.told for answer in alone[1::2]]
    for answer in together[1::2]:
        assert_valid(answer, schema)
        assert "".join(answer.pieces) == answer.text
    assert len({answer.text for answer in together[1::2]}) == len(formed), "hardly a random model"


def test_rows_with_and_without_grammars_do_not_change_each_other(router: LocalRouter, model: Path) -> None:
    plain = random_requests(24, seed=1, longest_prompt=20, longest_answer=100)
    assert_undisturbed(router, model, plain, SCHEMA, 16)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_rows_with_and_without_grammars_under_memory_pressure(narrow_router: LocalRouter, model: Path) -> None:
    before = narrow_router.core.stats.preemptions
    plain = random_requests(150, seed=2, longest_prompt=20, longest_answer=280)
    assert_undisturbed(narrow_router, model, plain, LONG, 32)
    assert narrow_router.core.stats.preemptions >= before + 10


@pytest.mark.fault("TGI#3043")
@pytest.mark.row("D: Continuous batching")
def test_a_row_that_gives_way_within_its_grammar_goes_on_as_if_undisturbed(narrow_router: LocalRouter) -> None:
    stats = narrow_router.core.stats
    requests = [under_grammar(seed, LONG, 450) for seed in range(16)]
    before = stats.preemptions
    together = narrow_router.run(sent(narrow_router, requests, 16))
    preemptions = stats.preemptions - before
    alone = narrow_router.run(sent(narrow_router, requests, 1))
    print(f"{preemptions} preemptions within a grammar")
    assert preemptions >= 3, "the pool was too large for this test to mean anything"
    assert stats.preemptions == before + preemptions, "a request that runs alone gave way"
    assert [answer.told for answer in together] == [answer.told for answer in alone]
    for answer in together:
        assert_valid(answer, LONG)


def test_fifty_new_schemas_at_once(router: LocalRouter) -> None:
    def schema(index: int) -> dict[str, Any]:
        fields = {f"field_{index}_{number}": {"enum": [index, number, None]} for number in range(5)}
        return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}

    answers = router.run(sent(router, [under_grammar(index, schema(index)) for index in range(50)], 50))
    for index, answer in enumerate(answers):
        assert_valid(answer, schema(index))


@pytest.mark.fault("outlines#658")
def test_broken_and_monstrous_grammars_hurt_nobody(router: LocalRouter) -> None:
    good = [under_grammar(seed) for seed in range(16)]
    alone = router.run(sent(router, good, 1))

    async def run() -> None:
        async with Client(router.url) as client:

            async def refused(index: int) -> None:
                grammar = MONSTERS[index % len(MONSTERS)]
                # A text of its own, so that nobody is told what another was told.
                body = {"inputs": "x", "parameters": {"grammar": spaced(grammar, index), "max_new_tokens": 5}}
                status, answer = await client.exchange("/generate", body)
                assert status in REFUSED, answer
                assert "grammar" in answer["error"]
                assert len(answer["error"]) < 1_000

            async with asyncio.TaskGroup() as group:
                for index in range(2 * len(MONSTERS)):
                    group.create_task(refused(index))
                tasks = [group.create_task(request.send(client)) for request in good]
            assert [task.result().told for task in tasks] == [answer.told for answer in alone]

    router.run(run())
    router.run(router.idle())


def test_a_grammar_that_turns_out_too_costly_is_its_own_request_s_error(router: LocalRouter) -> None:
    good = [under_grammar(seed) for seed in range(8)]
    alone = router.run(sent(router, good, 1))
    body = {"inputs": "hi", "parameters": {"grammar": COSTLY, "max_new_tokens": 400, "do_sample": True, "seed": 1}}

    async def run() -> None:
        async with Client(router.url) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(request.send(client)) for request in good]
            for path in ("/generate", "/generate_stream", "/generate"):
                status, answer = await client.exchange(path, body)
                assert status == 422, answer
                assert answer["error"].startswith("Input validation error: grammar cannot go on")
        assert [task.result().told for task in tasks] == [answer.told for answer in alone]

    router.run(run())
    router.run(router.idle())


def spaced(grammar: dict[str, Any], index: int) -> dict[str, Any]:
    value = grammar["value"]
    return {**grammar, "value": f"{value}{' ' * index}" if isinstance(value, str) else {**value, "title": str(index)}}


@pytest.mark.fault("outlines#658")
def test_a_heavy_schema_is_checked_and_compiled_while_others_go_on(router: LocalRouter) -> None:
    def heavy(index: int) -> dict[str, Any]:
        text = {"type": "string", "minLength": 20, "maxLength": 200 + index}
        fields = {f"field_{i}": {"type": "array", "maxItems": 200, "items": text} for i in range(6)}
        return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}

    async def run() -> None:
        async with Client(router.url) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(under_grammar(i, heavy(i), 300).send(client)) for i in range(12)]
            quick = await client.generate("hello", max_new_tokens=1)
            assert len(quick.ids) == 1
            assert not any(task.done() for task in tasks)
        for index, task in enumerate(tasks):
            answer = task.result()
            assert answer.finish == "eos_token" or begins(grammar_of(heavy(index)), answer.text)

    router.run(run())


@pytest.mark.fault("vllm#14326")
@pytest.mark.row("D: Finished and disconnected requests leave")
def test_hang_ups_within_a_grammar_leave_nothing(router: LocalRouter) -> None:
    """At every stage: while it is checked, compiled, written; with several answers."""
    core = router.core
    stages: tuple[Callable[[], bool], ...] = (
        lambda: True,  # sent, and no more
        lambda: bool(core.queue or core.rows),
        lambda: len(core.rows) >= 3,
        lambda: sum(len(entry.generated) > 20 for entry in core.rows) >= 3,
    )

    async def run() -> None:
        async with Client(router.url) as client:
            expected = await under_grammar(3).send(client)
            dropped = core.stats.dropped
            for turn, reached in enumerate(stages):
                fields = {f"p{turn}_{i}": LONG for i in range(20)}
                grammar = held({"type": "object", "properties": fields, "required": list(fields)})
                asked = {"grammar": grammar, "max_new_tokens": 900, "ignore_eos": False}
                callers = [
                    await Caller.call(router, path, "x", **asked, **more)
                    for path, more in (
                        ("/generate", {}),
                        ("/generate_stream", {"seed": 5, "do_sample": True}),
                        ("/generate", {"best_of": 2, "do_sample": True}),
                    )
                ]
                await until(reached, "that stage")
                stay = asyncio.create_task(under_grammar(3).send(client))
                for caller in callers:
                    await caller.hang_up()
                assert (await stay).told == expected.told
                await router.idle()
            assert core.stats.dropped >= dropped + 3

    router.run(run())


# Kinds.


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def matches(expression: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(expression, text) is not None


SUM = r"\d{1,3}(\+\d{1,3}){1,3}"
LARK = 'start: number ("+" number){1,3}\nnumber: /[0-9]{1,3}/\n'
GBNF = 'root ::= number more (more)?\nmore ::= "+" number\nnumber ::= [0-9] [0-9]?\n'
CHOICES = ["yes", "no (really)", "a|b", "日本 😀"]
KINDS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, is_object),
    "guided_regex": ({"guided_regex": DATE}, matches(DATE)),
    "regex": ({"response_format": {"type": "regex", "value": DATE}}, matches(DATE)),
    "guided_choice": ({"guided_choice": CHOICES}, CHOICES.__contains__),
    "lark": ({"guided_grammar": LARK}, matches(SUM)),
    "gbnf": ({"guided_grammar": GBNF}, matches(r"\d\d?(\+\d\d?){1,2}")),
    "structured_outputs": ({"structured_outputs": {"regex": DATE}}, matches(DATE)),
}


@pytest.mark.fault("TGI#2899")
def test_every_kind_of_grammar(router: LocalRouter) -> None:
    """Plain and streamed, at every temperature. What is not bounded may be cut."""

    async def run() -> list[tuple[str, Answer, Answer]]:
        async with Client(router.url) as client:

            async def both(name: str, index: int) -> tuple[str, Answer, Answer]:
                asked = {"max_tokens": 300, "temperature": (0, 0.8, 1.5)[index % 3], "seed": index, **KINDS[name][0]}
                # Of a random model: the end of a string is as likely as not.
                asked["logit_bias"] = {str(byte_id('"')): 5, str(byte_id("}")): 5}
                plain = await client.chat(messages(f"hi {index}"), **asked)
                return name, plain, await client.chat(messages(f"hi {index}"), stream=True, **asked)

            return await at_once(16, [lambda n=name, i=i: both(n, i) for name in KINDS for i in range(9)])

    found: dict[str, set[str]] = {name: set() for name in KINDS}
    for name, plain, streamed in router.run(run()):
        assert streamed.told[:3] == plain.told[:3]
        if plain.finish == "length":
            assert name == "json_object", plain
        else:
            assert KINDS[name][1](plain.text), (name, plain)
            found[name].add(plain.text)
    assert all(len(texts) > 1 for texts in found.values()), found


# Beside other parameters.


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.5, "presence_penalty": 1.5},
    "narrow": {"top_k": 1},
    "nucleus": {"top_p": 0.01},
    "typical": {"typical_p": 0.01},
    "min_p": {"min_p": 0.99},
    "bias against what must come": {"logit_bias": {str(byte_id(letter)): -100 for letter in "{namegtok"}},
    "bias for what must not come": {"logit_bias": {str(byte_id(letter)): 100 for letter in "Paris"}},
    "min_tokens": {"min_tokens": 390},
    "ignore_eos": {"ignore_eos": True},
    "watermark": {"watermark": True},
    "tops": {"top_n_tokens": 5},
    "uncached": {"cache": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_parameter_breaks_a_grammar(router: LocalRouter, name: str) -> None:
    requests = [under_grammar(seed, **OPTIONS[name]) for seed in range(6)]
    answers = router.run(sent(router, requests, 6))
    for answer in answers:
        assert_valid(answer)
        assert "".join(answer.pieces) == answer.text
    (alone,) = router.run(sent(router, requests[:1], 1))
    assert answers[0].told == alone.told


def test_a_grammar_cut_by_length_was_legal_so_far(router: LocalRouter) -> None:
    async def run() -> None:
        async with Client(router.url) as client:
            whole = await client.generate("hello", **under_grammar(1).parameters)
            for most in (1, 2, 5, len(whole.ids) - 1):
                cut = await client.generate("hello", **under_grammar(1, most=most).parameters)
                assert (cut.finish, cut.ids) == ("length", whole.ids[:most])
                assert begins(grammar_of(SCHEMA), cut.text)
            # Exactly as many as it needs, its end included.
            last = await client.generate("hello", **under_grammar(1, most=len(whole.ids)).parameters)
            assert (last.finish, last.ids) == ("eos_token", whole.ids)

    router.run(run())


@pytest.mark.row("A: stop")
def test_a_stop_string_ends_an_answer_within_its_grammar(router: LocalRouter) -> None:
    async def run() -> None:
        async with Client(router.url) as client:
            for seed in range(2):
                asked = under_grammar(seed).parameters
                whole = await client.generate("hello", **asked)
                for stream in (False, True):
                    found = await client.generate("hello", stream, **asked, stop=['"age"', "§"])
                    assert found.text == whole.text[: whole.text.index('"age"') + len('"age"')]
                    assert (found.finish, found.stop_reason) == ("stop_sequence", '"age"')
                    found = await client.generate("hello", stream, **asked, stop=["§"])
                    assert found.told == whole.told

    router.run(run())


@pytest.mark.row("B: n", "A: best_of, best_of_sequences")
def test_each_of_several_answers_holds_to_the_grammar(router: LocalRouter) -> None:
    text = "hello world " * 40  # more than a block: the others fork from the first

    async def run() -> None:
        async with Client(router.url) as client:
            body = CHAT.body(text, SCHEMA, MOST_TOKENS, {"n": 3, "temperature": 1.0, "seed": 7})
            status, answer = await client.exchange(CHAT.path, body)
            assert status == 200, answer
            texts = [choice["message"]["content"] for choice in answer["choices"]]
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
            parameters = {**under_grammar(1, best_of=2).parameters, "seed": None, "details": True}
            status, answer = await client.exchange("/generate", {"inputs": text, "parameters": parameters})
            assert status == 200, answer
            (other,) = answer["details"]["best_of_sequences"]
            texts += [answer["generated_text"], other["generated_text"]]
            for one in texts:
                Draft202012Validator(SCHEMA).validate(json.loads(one))
            assert len(set(texts)) == 5

    router.run(run())


# Tools.


@pytest.mark.fault("vllm#16880", "llama.cpp#27619")
@pytest.mark.row("B: tools, tool_choice, tool_prompt")
def test_calls_that_must_come_hold_to_their_schemas(router: LocalRouter) -> None:
    """Whatever a description says, it does not change what is written."""

    async def run() -> None:
        async with Client(router.url) as client:
            for seed in range(4):
                sampling = {"temperature": 1.0, "seed": seed, "tool_prompt": " "}
                for described in (SCHEMA, {**SCHEMA, "description": 'a "quoted" {brace}\n%json </tool_call>'}):
                    told = await ask(client, REQUIRED, "hello", described, MOST_TOKENS, **sampling)
                    assert told.status == 200, told
                    assert not told.is_cut
                    Draft202012Validator(SCHEMA).validate(json.loads(told.text))

    router.run(run())
