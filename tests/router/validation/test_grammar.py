"""The shapes in which requests name a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tgi.errors import InvalidRequest
from tgi.router.validation.grammar import (
    MAX_CHOICES,
    MAX_SOURCE,
    GrammarWish,
    guided_grammar,
    native_grammar,
    prepare_schema,
    response_format_grammar,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}


@pytest.mark.row("A: grammar")
@pytest.mark.parametrize(
    ("grammar", "kind", "value"),
    [
        ({"type": "json", "value": SCHEMA}, "json_schema", SCHEMA),
        ({"type": "json", "value": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"type": "json_object", "value": SCHEMA}, "json_schema", SCHEMA),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA, "strict": True}}, "json_schema", SCHEMA),
        ({"type": "json_schema", "value": {"schema": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"type": "json", "value": {"anyOf": [True]}}, "json_schema", {"anyOf": [True]}),
        ({"type": "regex", "value": "a+"}, "regex", "a+"),
    ],
)
def test_tgis_tagged_object(grammar: dict[str, Any], kind: str, value: Any) -> None:
    wish = GrammarWish(kind, value, "grammar")  # type: ignore[arg-type]
    assert native_grammar(grammar) == wish
    assert response_format_grammar(grammar, "grammar") == wish


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({}, "`grammar.type` must be one of"),
        ({"type": "xml", "value": "a"}, "`grammar.type` must be one of .* Given: 'xml'"),
        ({"type": "json"}, "`grammar` has no `value`"),
        ({"type": "json", "value": 5}, "^grammar is not supported$"),
        ({"type": "json", "value": "{"}, "grammar is not valid: the schema is no JSON"),
        ({"type": "json", "value": '{"minimum": NaN}'}, "grammar is not valid: the schema is no JSON: NaN"),
        ({"type": "json", "value": "[" * 100_000}, "grammar is not valid: the schema is no JSON"),
        ({"type": "json_schema", "value": SCHEMA}, "`grammar.value` must be an object with a `schema`"),
        ({"type": "regex", "value": {}}, "`grammar` must be a text"),
        ({"type": "regex", "value": ""}, "`grammar` must be a text that is not empty"),
        ({"type": "regex", "value": "a" * (MAX_SOURCE + 1)}, "grammar is not valid: it has 262145 characters"),
    ],
)
def test_what_is_no_grammar_is_blamed_on_its_field(grammar: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        native_grammar(grammar)
    assert caught.value.param == "grammar"


@pytest.mark.fault("TGI#3058")
@pytest.mark.row("B: response_format")
@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json", "value": SCHEMA},
    ],
)
def test_openais_shape_and_tgis_shape_mean_the_same(response_format: dict[str, Any]) -> None:
    assert response_format_grammar(response_format) == GrammarWish("json_schema", SCHEMA, "response_format")


@pytest.mark.fault("TGI#2899")
def test_json_without_a_schema_is_any_object() -> None:
    assert response_format_grammar({"type": "json_object"}) == GrammarWish("json_object", None, "response_format")
    assert response_format_grammar({"type": "json_object", "value": None}) is not None


def test_free_text_is_no_grammar() -> None:
    assert response_format_grammar({"type": "text"}) is None


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ({}, "`response_format.type` must be one of `text`"),
        ({"type": "xml"}, "Given: 'xml'"),
        ({"type": "json_schema"}, "`response_format.json_schema` must be an object with a `schema`"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "must be an object with a `schema`"),
        ({"type": "regex"}, "`response_format` has no `value`"),
    ],
)
def test_a_response_format_of_another_shape(response_format: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        response_format_grammar(response_format)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({}, None),
        ({"guided_json": SCHEMA}, GrammarWish("json_schema", SCHEMA, "guided_json")),
        ({"guided_json": json.dumps(SCHEMA)}, GrammarWish("json_schema", SCHEMA, "guided_json")),
        ({"guided_regex": "a"}, GrammarWish("regex", "a", "guided_regex")),
        ({"guided_choice": ["a", "b", "a"]}, GrammarWish("choice", ("a", "b"), "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, GrammarWish("lark", 'start: "a"', "guided_grammar")),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarWish("json_schema", SCHEMA, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a", "json": None}}, GrammarWish("regex", "a", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarWish("choice", ("a",), "structured_outputs.choice")),
        (
            {"structured_outputs": {"grammar": "root ::= [a]"}},
            GrammarWish("lark", "root ::= [a]", "structured_outputs.grammar"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            GrammarWish("json_object", None, "structured_outputs.json_object"),
        ),
        ({"structured_outputs": {"json_object": False, "disable_any_whitespace": False}}, None),
    ],
)
def test_the_extensions(fields: dict[str, Any], wish: GrammarWish | None) -> None:
    assert guided_grammar(**fields) == wish


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"guided_json": {}, "guided_regex": "a"},
            "`guided_json` and `guided_regex` exclude each other",
            "guided_regex",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "`structured_outputs.regex` and `structured_outputs.choice` exclude each other",
            "structured_outputs.choice",
        ),
        ({"guided_choice": []}, "`guided_choice` must be a list of strings, none of them empty", "guided_choice"),
        ({"guided_choice": ["a", ""]}, "none of them empty", "guided_choice"),
        ({"guided_choice": ["a", 1]}, "must be a list of strings", "guided_choice"),
        ({"guided_choice": list(map(str, range(MAX_CHOICES + 1)))}, "supports up to 10000 choices", "guided_choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern` is not supported", None),
        ({"structured_outputs": {"structural_tag": "{"}}, "structural_tag` is no JSON", None),
        ({"structured_outputs": {"structural_tag": {"structures": []}}}, "must be an object with `triggers`", None),
        (
            {
                "structured_outputs": {
                    "structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}
                }
            },
            "has no trigger that '<a>' begins with",
            None,
        ),
        ({"structured_outputs": [1]}, "`structured_outputs` must be an object", "structured_outputs"),
        ({"guided_grammar": "start: %json {"}, "no JSON behind `%json`", "guided_grammar"),
        ({"guided_grammar": 'start: %json {"uniqueItems": true}'}, "`uniqueItems` is not supported", "guided_grammar"),
    ],
)
def test_extensions_that_are_refused(fields: dict[str, Any], message: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        guided_grammar(**fields)
    assert param is None or caught.value.param == param


def test_an_extension_beside_a_response_format_is_refused_naming_both() -> None:
    other = response_format_grammar({"type": "json_object"})
    assert guided_grammar(other=other) is other
    with pytest.raises(InvalidRequest, match="`response_format` and `guided_regex` exclude each other"):
        guided_grammar(guided_regex="a", other=other)


def test_a_schema_within_a_lark_grammar_is_made_enforceable() -> None:
    wish = guided_grammar(guided_grammar='start: a | "b"\na: %json {"properties": {"x": true}} "!"\n')
    assert wish is not None
    head, _, rest = wish.value.partition("%json ")
    schema, end = json.JSONDecoder().raw_decode(rest)
    assert head == 'start: a | "b"\na: '
    assert schema["additionalProperties"] is False
    assert rest[end:].startswith(' "!"\n')


def test_a_prepared_schema_is_one_line_of_json_that_keeps_the_order() -> None:
    text = prepare_schema({"properties": {"b": {"type": "null", "title": "\n"}, "a": {"type": "string"}}}, "tools")
    assert text.startswith("{")
    assert "\n" not in text
    assert list(json.loads(text)["properties"]) == ["b", "a"]
    assert prepare_schema(json.dumps(SCHEMA), "tools") == prepare_schema(SCHEMA, "tools")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": {"a/b": {"uniqueItems": True}}}, "`uniqueItems` .*, at #/properties/a~1b"),
        ({"description": "a" * (MAX_SOURCE + 1)}, "at most 262144 are checked"),
        ("[]", "grammar is not supported"),
        ({"properties": {str(i): {"maxLength": i} for i in range(401)}}, "more than 400 parts"),
    ],
)
def test_a_schema_that_cannot_be_prepared_is_blamed_on_its_field(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        prepare_schema(schema, "tools")
    assert caught.value.param == "tools"
