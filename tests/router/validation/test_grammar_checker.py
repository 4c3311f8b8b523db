"""The check of a grammar: what it lets pass and how it is spelled for the shard, its limits, and many at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from tests.fakes.grammars import accepts, matcher_of, spelled, write
from tests.fakes.tokenizer import TURN_END, byte_tokenizer
from tgi.errors import InvalidRequest, Overloaded
from tgi.router.validation import grammar_checker
from tgi.router.validation.grammar import GrammarWish, guided_grammar
from tgi.router.validation.grammar_checker import MAX_WAITING, NUM_WORKERS, Engine, GrammarChecker
from tgi.shard_client.messages import Grammar

TOKENIZER = byte_tokenizer()
ENGINE = Engine(TOKENIZER)
PRETTY = json.dumps({"a": [1, {"b": "c"}], "d": {}}, indent=4)


def schema_grammar(schema: Any) -> Grammar:
    return passed("json_schema", json.dumps(schema))


def passed(kind: str, source: str) -> Grammar:
    found = ENGINE.check(kind, source)
    assert isinstance(found, Grammar), found
    return found


def refusal(kind: str, source: str) -> str:
    found = ENGINE.check(kind, source)
    assert isinstance(found, str), found
    return found


def choices(*texts: str) -> str:
    return json.dumps(texts)


def run(scenario: Callable[[GrammarChecker], Awaitable[None]]) -> None:
    async def within() -> None:
        checker = GrammarChecker(TOKENIZER)
        try:
            await scenario(checker)
        finally:
            checker.close()

    asyncio.run(within())


# What an answer looks like.


@pytest.mark.fault("vllm#12201")
def test_exactly_two_items() -> None:
    grammar = schema_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2})
    assert [accepts(grammar, text) for text in ("[1,2]", "[1]", "[1,2,3]", "[]")] == [True, False, False, False]


@pytest.mark.fault("vllm#12028")
def test_an_integer_within_its_bounds() -> None:
    grammar = schema_grammar({"type": "integer", "minimum": 1, "maximum": 5})
    assert [number for number in range(-20, 70) if accepts(grammar, str(number))] == [1, 2, 3, 4, 5]


@pytest.mark.fault("llguidance#265")
def test_pattern_properties() -> None:
    grammar = schema_grammar({"type": "object", "patternProperties": {"^n_": {"type": "integer"}}})
    assert accepts(grammar, '{"n_a":1,"n_b":2}')
    assert not accepts(grammar, '{"n_a":"x"}')
    assert not accepts(grammar, '{"m":1}')
    assert "not disjoint" in refusal("json_schema", '{"type": "object", "patternProperties": {"a": {}, "b": {}}}')


@pytest.mark.fault("xgrammar#192")
def test_one_of_a_bounded_integer_and_a_referenced_array() -> None:
    schema = {
        "oneOf": [{"type": "integer", "minimum": 1, "maximum": 3}, {"$ref": "#/$defs/list"}],
        "$defs": {"list": {"type": "array", "items": {"type": "string"}}},
    }
    grammar = schema_grammar(schema)
    assert [accepts(grammar, text) for text in ("2", '["a"]', "4", "[1]")] == [True, True, False, False]


@pytest.mark.fault("llama.cpp#27619")
def test_annotations_never_change_the_grammar() -> None:
    def schema(**annotations: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5, **annotations}}, **annotations}

    plain = schema_grammar(schema())
    for text in ('"quoted" {braced} \n/*', "#/$defs/a", "%json", "\u2028\u0000"):
        assert schema_grammar(schema(description=text, title=text, default=text, examples=[text])) == plain


def test_properties_keep_their_order() -> None:
    schema = {
        "allOf": [{"properties": {"z": {"type": "null"}, "a": {"type": "null"}}}],
        "properties": {"m": {"type": "null"}},
    }
    grammar = schema_grammar({"type": "object", **schema, "required": ["a", "z", "m"]})
    assert accepts(grammar, '{"z":null,"a":null,"m":null}')
    assert not accepts(grammar, '{"a":null,"z":null,"m":null}')


def test_any_object_is_an_object() -> None:
    grammar = passed("json_object", "")
    assert accepts(grammar, PRETTY)
    for text in ("[]", "1", '"a"', "null", "{", '{"a"}', " {}", "{} "):
        assert not accepts(grammar, text)


@pytest.mark.parametrize("blanks", [" " * 3, "\n" * 2, " \n", "\t", "\n" + " " * 41])
def test_blanks_are_bounded(blanks: str) -> None:
    grammar = passed("json_object", "")
    assert accepts(grammar, PRETTY)
    assert not accepts(grammar, f'{{{blanks}"a":1}}')
    assert not accepts(grammar, f'{{"a":{blanks}1}}')


@pytest.mark.parametrize(
    ("schema", "beginning"),
    [
        ({"type": "integer"}, "9" * 15),
        ({"type": "number"}, "-" + "9" * 15 + ".000000001"),
        ({"type": "number"}, "0." + "0" * 9),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, "0." + "9" * 9),
        ({"type": "number", "multipleOf": 0.25}, "0.75"),
        ({}, "0." + "1" * 9),
    ],
)
def test_a_number_comes_to_its_end(schema: Any, beginning: str) -> None:
    matcher = matcher_of(schema_grammar({"type": "array", "items": schema}))
    assert matcher.consume_tokens(list(f"[{beginning}".encode()))
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert {chr(token) for token in range(256) if mask >> token & 1} <= set(" \n,]")


def test_random_text_of_any_object_parses() -> None:
    grammar, rng = passed("json_object", ""), Random(5)
    texts = [write(grammar, rng, 500, hurry=0.7) for _ in range(20)]
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)
    assert texts.count(None) < 5


# Regular expressions, choices, Lark.


@pytest.mark.row("A: grammar")
@pytest.mark.parametrize(
    ("expression", "matched", "others"),
    [
        ("a+b", ["ab", "aaab"], ["b", "abb"]),
        ("^a+$", ["a", "aa"], ["", "ab"]),
        (r"^\$5\$", ["$5$"], ["5", "$5"]),
        (r"a\\$", ["a\\"], ["a", "a\\$"]),
        ("(^a$|^b$)", ["a", "b"], ["ab"]),
        (r"\d{3}-\w\s", ["123-a "], ["١٢٣-a ", "123-é ", "12-a "]),
        (r"a/b", ["a/b"], ["ab"]),
        ("(?i)yes|no", ["YES", "no"], ["maybe"]),
        (r"[\w.+-]+@[\w-]+\.[\w.-]+", ["a.b@c.de"], ["a@b"]),
        ("line\nbreak|[^x]é", ["line\nbreak", "aé"], ["xé"]),
    ],
)
def test_a_regex_matches_the_whole_text(expression: str, matched: list[str], others: list[str]) -> None:
    grammar = passed("regex", expression)
    assert [text for text in (*matched, *others) if accepts(grammar, text)] == matched


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(?=a)b", "look-around"),
        (r"\bword", "lookarounds"),
        ("(a", "unclosed group"),
        (r"a\Z", "unrecognized escape sequence"),
        (r"[^\s\S]", "no text satisfies it"),
        ("a{3,1}", "invalid repetition"),
    ],
)
def test_a_regex_of_another_dialect_is_refused_saying_why(expression: str, reason: str) -> None:
    found = refusal("regex", expression)
    assert reason in found
    assert "\n" not in found
    assert len(found) <= 400


def test_choices_are_taken_literally() -> None:
    texts = ["a", "a.b|c*", 'with "quotes"\n', "é\\[x]{2}^$"]
    grammar = passed("choice", choices(*texts))
    assert all(accepts(grammar, text) for text in texts)
    assert not any(accepts(grammar, text) for text in ("", "b", "axb", "aa", "a.b"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('start: "a" b+\nb: /[0-9]/ | "x"', "a1x"),
        ('root ::= "a" b+\nb ::= [0-9] | "x"', "a1x"),
        ("start[lazy]: /a[0-9]+/", "a1"),
    ],
)
def test_lark_and_ebnf(source: str, text: str) -> None:
    grammar = passed("lark", source)
    assert grammar.kind == "lark"
    assert accepts(grammar, text)


def test_an_end_token_is_not_the_grammars_to_place() -> None:
    """All of a model's end tokens are allowed where the text may end, and only there."""
    assert f"it names {TURN_END}, which ends an answer by itself" in refusal("lark", f'start: "a" {TURN_END} "b"')


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("hello world", "neither Lark"),
        ("root ::= b", "Rule 'b' not found"),
        ("a ::= b\n" * 501, "more than 500 rules"),
        ("start: b", "b"),
        ("start: start", "no text satisfies it"),
        ('start: "a" start', "Too many items"),
        ('start: "a" <|none|>', "unknown special token"),
    ],
)
def test_another_grammar_is_refused_saying_why(source: str, reason: str) -> None:
    assert reason in refusal("lark", source)


def test_a_structural_tag_holds_its_spans_and_leaves_the_rest_free() -> None:
    tag = {
        "triggers": ["<call="],
        "structures": [
            {"begin": f"<call={name}>", "schema": {"properties": {"a": schema}}, "end": "</call>"}
            for name, schema in (("one", {"type": "integer"}), ("two", {"type": "null"}))
        ],
    }
    for value in (tag, json.dumps(tag)):
        wish = guided_grammar(structured_outputs={"structural_tag": value})
        assert wish is not None
        grammar = passed("lark", wish.value)
        assert accepts(grammar, "free text")
        assert accepts(grammar, 'first <call=one>{"a":1}</call> then <call=two>{"a":null}</call>\n')
        assert not accepts(grammar, '<call=one>{"a":null}</call>')
        assert not accepts(grammar, "<call=three>")


# Limits.


def deep_schema(levels: int) -> str:
    return '{"items":' * levels + "true" + "}" * levels


@pytest.mark.fault("llama.cpp#25746", "outlines#658")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"properties": {"b": {"type": "string", "maxLength": 2_000}}}}},
        {"type": "string", "minLength": 1, "maxLength": 1_000_000},
        {
            "type": "object",
            "properties": {
                f"field_{i}": {
                    "type": "array",
                    "maxItems": 200,
                    "items": {"type": "string", "minLength": 20, "maxLength": 200},
                }
                for i in range(6)
            },
        },
        {"enum": [f"value {i}" for i in range(10_000)]},
        {"type": "array", "maxItems": 2_000, "items": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    ],
    ids=["long-string", "longer-string", "many-bounds", "enum", "many-items"],
)
def test_large_bounds_compile(schema: Any) -> None:
    schema_grammar(schema)


@pytest.mark.fault("outlines#658")
@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "(a{1000}){1000}", "too many expressions"),
        ("regex", "((((((((((a{9}){9}){9}){9}){9}){9}){9}){9}){9}){9})", "too many expressions"),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000, "invalid regex"),
        ("lark", 'start: X{100000}\nX: "a" | "aa"', "Too many items"),
        ("json_schema", deep_schema(65), "nested more than 64 levels"),
        ("json_schema", deep_schema(100_000), "nested too deeply"),
        ("json_schema", '{"maxItems": 1000000000}', "above 2000"),
        (
            "json_schema",
            json.dumps({"prefixItems": [{"type": "array", "maxItems": 2_000} for _ in range(11)]}),
            "add up to more than 20000",
        ),
        (
            "json_schema",
            json.dumps({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(10)]}),
            "more than 1000 cases",
        ),
        (
            "json_schema",
            json.dumps({"properties": {str(i): {"maxLength": i} for i in range(2_001)}}),
            "more than 2000 parts",
        ),
        (
            "json_schema",
            json.dumps({"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(150)]}),
            "too many comparisons",
        ),
        (
            "json_schema",
            json.dumps({"patternProperties": {f"^{i}_": {} for i in range(65)}}),
            "more than 64 `patternProperties`",
        ),
        (
            "json_schema",
            json.dumps(
                {
                    "type": "object",
                    "allOf": [
                        {"anyOf": [{"properties": {f"{'p' * 300}_{i}_{j}": {}}} for j in range(2)]} for i in range(9)
                    ],
                }
            ),
            "once it is written out",
        ),
        ("lark", f"start: /{'a' * 1_100_000}/", "once it is written out"),
        ("json_schema", json.dumps({"const": "\ud800"}), "lone surrogate"),
    ],
    ids=lambda value: value[:30],
)
def test_the_monstrous_is_refused_saying_why(kind: str, source: str, reason: str) -> None:
    assert reason in refusal(kind, source)


# Many at once.


def test_a_refusal_is_blamed_on_the_field_that_asked() -> None:
    async def scenario(checker: GrammarChecker) -> None:
        for param in ("grammar", "response_format"):
            with pytest.raises(InvalidRequest, match=r"^grammar is not valid: `contains` is not supported") as caught:
                await checker.check(GrammarWish("json_schema", {"contains": {}}, param))
            assert caught.value.param == param
        with pytest.raises(InvalidRequest, match="at most 262144 are checked"):
            await checker.check(GrammarWish("json_schema", {"const": "a" * 300_000}, "grammar"))

    run(scenario)


def test_results_and_refusals_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = Engine.check

    def counting(self: Engine, kind: str, source: str) -> Grammar | str:
        checked.append(source)
        return check(self, kind, source)

    monkeypatch.setattr(Engine, "check", counting)
    monkeypatch.setattr(grammar_checker, "CACHE_SIZE", 1_000)

    async def scenario(checker: GrammarChecker) -> None:
        async def ask(expression: str) -> None:
            try:
                await checker.check(GrammarWish("regex", expression, "grammar"))
            except InvalidRequest:
                assert expression == "("

        await asyncio.gather(*(ask("a") for _ in range(5)))
        for expression in ("a", "(", "("):
            await ask(expression)
        assert checked == ["a", "("]
        await ask("b" * 475)  # there is no room for all: the one that was asked for the longest ago goes
        await ask("a")
        assert checked == ["a", "(", "b" * 475, "a"]

    run(scenario)


class Stuck:
    """An engine that answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        monkeypatch.setattr(Engine, "check", self.check)

    def check(self, kind: str, source: str) -> Grammar | str:
        self.begun.release()
        self.go.wait()
        return Grammar(kind, source)


def test_too_many_at_once_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)

    async def scenario(checker: GrammarChecker) -> None:
        asked = [
            asyncio.create_task(checker.check(GrammarWish("regex", str(i), "grammar"))) for i in range(MAX_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await checker.check(GrammarWish("regex", "more", "grammar"))
        again = asyncio.create_task(checker.check(GrammarWish("regex", "7", "grammar")))
        stuck.go.set()
        assert await asyncio.gather(*asked) == [Grammar("regex", str(i)) for i in range(MAX_WAITING)]
        assert await again == Grammar("regex", "7")

    run(scenario)


def test_who_waits_too_long_is_told_which_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    monkeypatch.setattr(grammar_checker, "MAX_SECONDS", 0.05)

    async def scenario(checker: GrammarChecker) -> None:
        running = [asyncio.create_task(checker.check(GrammarWish("regex", str(i), "g"))) for i in range(NUM_WORKERS)]
        for _ in running:
            await asyncio.to_thread(stuck.begun.acquire)
        with pytest.raises(Overloaded):  # it never began
            await checker.check(GrammarWish("regex", "next", "g"))
        for task in running:
            with pytest.raises(InvalidRequest, match=r"its check takes longer than 0\.05 s"):
                await task
        stuck.go.set()
        assert await checker.check(GrammarWish("regex", "next", "g")) == Grammar("regex", "next")

    run(scenario)


def test_a_client_that_leaves_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)

    async def scenario(checker: GrammarChecker) -> None:
        wish = GrammarWish("regex", "a", "grammar")
        leaving, staying = (asyncio.create_task(checker.check(wish)) for _ in range(2))
        await asyncio.to_thread(stuck.begun.acquire)
        leaving.cancel()
        await asyncio.wait((leaving,))
        stuck.go.set()
        assert await staying == Grammar("regex", "a")

    run(scenario)


def test_a_panic_of_the_engine_is_one_request_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(self: Engine, kind: str, source: str) -> Grammar | str:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(Engine, "check", panic)

    async def scenario(checker: GrammarChecker) -> None:
        with pytest.raises(InvalidRequest, match=r"^grammar is not valid: the grammar engine failed$"):
            await checker.check(GrammarWish("regex", "a", "grammar"))

    run(scenario)


def test_values_and_their_spelling_differ() -> None:
    """1 and true are not the same grammar, nor are two orders of properties."""
    assert schema_grammar({"const": 1}) != schema_grammar({"const": True})
    assert not accepts(schema_grammar({"enum": [1]}), spelled(True))
