"""JSON schemas to try a server with: a table with a case for every keyword, and a generator of random ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

KEYWORDS_2020_12 = frozenset(
    (
        # core
        *("$schema", "$id", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$vocabulary", "$comment", "$defs"),
        # applicator
        *("prefixItems", "items", "contains", "additionalProperties", "properties", "patternProperties"),
        *("dependentSchemas", "propertyNames", "if", "then", "else", "allOf", "anyOf", "oneOf", "not"),
        # unevaluated
        *("unevaluatedItems", "unevaluatedProperties"),
        # validation
        *("type", "const", "enum", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
        *("maxLength", "minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains"),
        *("maxProperties", "minProperties", "required", "dependentRequired"),
        # meta-data, format, content
        *("title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples"),
        *("format", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)


@dataclass(frozen=True)
class SchemaCase:
    """`valid` instances can be written, `invalid` ones cannot; or the schema is refused, in words with `refused`."""

    keyword: str
    schema: Any
    valid: list[Any] = field(default_factory=list)
    invalid: list[Any] = field(default_factory=list)
    refused: str | None = None


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


NULL = {"type": "null"}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": _object({"value": {"type": "integer"}, "next": {"anyOf": [NULL, {"$ref": "#/$defs/node"}]}}, "value")
    },
}

CASES = [
    # Any instance, and none.
    SchemaCase("boolean", True, [None, 1, "a", [[]], {"a": {}}]),
    SchemaCase("boolean", {}, [True, 1.5, "", [1, "a"], {"": None}]),
    SchemaCase("boolean", False, refused="no value satisfies the schema"),
    SchemaCase("boolean", _object({"a": False, "b": True}), [{}, {"b": 1}], [{"a": 1}]),
    # Types.
    SchemaCase("type", {"type": "null"}, [None], [0, False, ""]),
    SchemaCase("type", {"type": "boolean"}, [True, False], [None, 1]),
    SchemaCase("type", {"type": "integer"}, [0, -1, 123456789012345], [1.5, "1", None]),
    SchemaCase("type", {"type": "number"}, [0, -1.5, 0.001, 123456.789], ["1", None, True]),
    SchemaCase("type", {"type": "string"}, ["", 'é𝒳\n"\\ \u0001', "a" * 300], [1, None, ["a"]]),
    SchemaCase("type", {"type": "array"}, [[], [1, "a", None], [[[]]]], [{}, "[]"]),
    SchemaCase("type", {"type": "object"}, [{}, {"a": 1}, {"b": {"c": []}}], [[], None]),
    SchemaCase("type", {"type": ["integer", "null"]}, [1, None], [1.5, "a"]),
    SchemaCase("type", {"type": ["integer", "number"]}, [1, 1.5], [None]),
    SchemaCase("type", {"type": "file"}, refused="`type` must be one or several of"),
    SchemaCase("type", {"type": []}, refused="`type` must be"),
    SchemaCase("const", {"const": {"a": [1, 2.0, None]}}, [{"a": [1, 2, None]}], [{"a": [1, 2]}, {}]),
    SchemaCase("const", {"const": 'é\n"\\/\u2028'}, ['é\n"\\/\u2028'], ["e", ""]),
    SchemaCase("const", {"const": 1}, [1], [2, True, "1"]),
    SchemaCase("const", {"const": True}, [True], [1, False]),
    SchemaCase("const", {"const": 9007199254740993}, refused="beyond 2^53"),
    SchemaCase("const", {"const": 5, "type": "string"}, refused="no value satisfies"),
    SchemaCase("const", {"const": [1], "minItems": 2}, refused="`minItems` beside `const` or `enum`"),
    SchemaCase("enum", {"enum": ["a", 1, None, 1.5, [True]]}, ["a", 1, None, 1.5, [True]], ["b", 2, True]),
    SchemaCase("enum", {"enum": ["ab", "b", "abc", 7], "pattern": "^a", "maxLength": 2}, ["ab", 7], ["b", "abc"]),
    SchemaCase("enum", {"enum": [1, 5, 9, 2.5], "type": "integer", "minimum": 3}, [5, 9], [1, 2.5]),
    SchemaCase("enum", {"type": "integer", "enum": [2.5, 1.0, "a"]}, [1], [2.5, "a"]),
    SchemaCase("enum", {"allOf": [{"enum": [1, 2, 3]}, {"enum": [3, 2.0]}]}, [2, 3], [1]),
    SchemaCase("enum", {"enum": []}, refused="`enum` must be a list that is not empty"),
    # Numbers.
    SchemaCase("minimum", {"type": "integer", "minimum": 1, "maximum": 5}, [1, 3, 5], [0, 6, -1, 50]),
    SchemaCase("minimum", {"type": "number", "minimum": -0.5}, [-0.5, 0, 12.25, 10**12], [-0.6, -1]),
    SchemaCase("minimum", {"type": "integer", "minimum": 1.5}, [2], [1]),
    SchemaCase("minimum", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(10**14)], [1.5]),
    SchemaCase("minimum", {"type": "number", "minimum": 2000000, "multipleOf": 0.000000001}, [2000000.5], [1]),
    SchemaCase("minimum", {"type": "integer", "minimum": 10**16}, refused="more than 15 digits"),
    SchemaCase("maximum", {"type": "number", "maximum": 2.5}, [2.5, -7, 2], [2.51, 3]),
    SchemaCase("maximum", {"type": "integer", "minimum": 5, "maximum": 4}, refused="no value satisfies"),
    SchemaCase("maximum", {"type": "integer", "maximum": "5"}, refused="`maximum` must be a number"),
    SchemaCase("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.25, 0.5], [0, 0.51]),
    SchemaCase("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 1}, [2, 30], [1, 0]),
    SchemaCase("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, [9, -3], [10, 11]),
    SchemaCase("exclusiveMaximum", {"type": "number", "minimum": 1, "exclusiveMaximum": 1}, refused="no value"),
    SchemaCase("multipleOf", {"type": "integer", "multipleOf": 5}, [0, -15, 100], [1, 7]),
    SchemaCase("multipleOf", {"type": "number", "multipleOf": 0.5}, [0.5, -2, 7.5], [0.25, 1.3]),
    SchemaCase("multipleOf", {"allOf": [{"multipleOf": 4}, {"multipleOf": 6, "type": "integer"}]}, [12, -24], [4, 6]),
    SchemaCase("multipleOf", {"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, refused="no value"),
    SchemaCase("multipleOf", {"type": "number", "multipleOf": 0.00000000001}, refused="decimals"),
    SchemaCase("multipleOf", {"type": "number", "multipleOf": 0}, refused="`multipleOf` must be"),
    # Strings.
    SchemaCase("minLength", {"type": "string", "minLength": 2}, ["ab", "𝒳é", "abc"], ["", "a", "𝒳"]),
    SchemaCase("maxLength", {"type": "string", "maxLength": 3}, ["", "𝒳𝒳𝒳", "a\nb"], ["abcd"]),
    SchemaCase("maxLength", {"type": "string", "minLength": 3, "maxLength": 2}, refused="no value satisfies"),
    SchemaCase("pattern", {"type": "string", "pattern": "^[a-c]{2}\\d$"}, ["ab1", "cc9"], ["ab", "xab1", "ab12"]),
    SchemaCase("pattern", {"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
    SchemaCase(
        "pattern", {"type": "string", "pattern": "^a|b$", "maxLength": 3}, ["a", "xb", "ab"], ["xa", "bx", "aaaa"]
    ),
    SchemaCase(
        "pattern", {"allOf": [{"pattern": "^a", "type": "string"}, {"pattern": "z$"}]}, ["az", "abz"], ["a", "z"]
    ),
    SchemaCase("pattern", {"type": "string", "pattern": "^(?=a)"}, refused="look-around"),
    SchemaCase("pattern", {"type": "string", "pattern": "("}, refused="unclosed group"),
    SchemaCase("pattern", {"type": "string", "pattern": "^a{3}$", "maxLength": 2}, refused="Unsatisfiable"),
    SchemaCase("format", {"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
    SchemaCase("format", {"type": "string", "format": "date-time"}, ["2024-02-29T23:59:59Z"], ["2024-02-29"]),
    SchemaCase("format", {"type": "string", "format": "time"}, ["23:59:59Z"], ["24:00:00Z"]),
    SchemaCase("format", {"type": "string", "format": "duration"}, ["P1Y2M", "PT5S"], ["1Y"]),
    SchemaCase("format", {"type": "string", "format": "email"}, ["a.b@c.de"], ["a.b"]),
    SchemaCase("format", {"type": "string", "format": "hostname"}, ["a.example"], ["-a", ""]),
    SchemaCase("format", {"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1"]),
    SchemaCase("format", {"type": "string", "format": "ipv6"}, ["::1", "fe80::1"], ["1"]),
    SchemaCase("format", {"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["1"]),
    SchemaCase("format", {"type": "string", "format": "uri"}, ["https://a.example/b?c#d"], ["b"]),
    SchemaCase("format", {"type": "string", "format": "idn-email"}, refused="`format` 'idn-email' is not supported"),
    SchemaCase("format", {"type": "string", "format": "password"}, ["secret"]),
    SchemaCase("format", {"type": "integer", "format": "int32"}, [5], ["5"]),
    # Arrays.
    SchemaCase("items", {"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]]),
    SchemaCase("items", {"type": "array", "items": False}, [[]], [[1]]),
    SchemaCase("items", {"type": "array", "items": [NULL, {"type": "boolean"}]}, [[], [None, True]], [[True]]),
    SchemaCase("prefixItems", {"type": "array", "prefixItems": [NULL], "items": {"const": 1}}, [[], [None, 1]], [[1]]),
    SchemaCase("prefixItems", {"type": "array", "prefixItems": [NULL], "minItems": 1}, [[None], [None, "a"]], [[]]),
    SchemaCase(
        "prefixItems",
        {"allOf": [{"type": "array", "prefixItems": [{"minimum": 3}]}, {"items": {"type": "integer"}, "maxItems": 2}]},
        [[], [3], [4, 0]],
        [[2], [3, "a"], [3, 1, 1]],
    ),
    SchemaCase("additionalItems", {"type": "array", "items": [NULL], "additionalItems": False}, [[None]], [[None, 1]]),
    SchemaCase(
        "minItems", {"type": "array", "items": NULL, "minItems": 2, "maxItems": 2}, [[None, None]], [[], [None]]
    ),
    SchemaCase("minItems", {"type": "array", "minItems": 2, "maxItems": 1}, refused="no value satisfies"),
    SchemaCase("minItems", {"type": "array", "items": False, "minItems": 1}, refused="no value satisfies"),
    SchemaCase("maxItems", {"type": "array", "items": NULL, "maxItems": 1}, [[], [None]], [[None, None]]),
    SchemaCase("maxItems", {"type": "array", "maxItems": 1_000_000}, refused="above 2000 are not supported"),
    SchemaCase("uniqueItems", {"type": "array", "uniqueItems": False}, [[1, 1]]),
    SchemaCase("uniqueItems", {"type": "array", "uniqueItems": True}, refused="`uniqueItems` is not supported, at #"),
    SchemaCase("contains", {"type": "array", "contains": NULL}, refused="`contains` is not supported"),
    SchemaCase("minContains", {"type": "array", "items": NULL, "minContains": 3}, [[], [None]], [[1]]),
    SchemaCase("maxContains", {"type": "array", "items": NULL, "maxContains": 0}, [[], [None]], [[1]]),
    SchemaCase("unevaluatedItems", {"type": "array", "unevaluatedItems": False}, refused="`unevaluatedItems`"),
    # Objects.
    SchemaCase(
        "properties", _object({"b": NULL, "a": {"const": 1}}), [{}, {"b": None, "a": 1}], [{"b": 1}, {"a": None}]
    ),
    SchemaCase("properties", {"properties": {"a": NULL}}, [{}, {"a": None}], [{"a": 1}]),
    SchemaCase("properties", _object({'"\\\n/': NULL, "é": NULL}, "é"), [{'"\\\n/': None, "é": None}], [{}]),
    SchemaCase(
        "required", _object({"a": NULL, "b": NULL}, "b"), [{"b": None}, {"a": None, "b": None}], [{}, {"a": None}]
    ),
    SchemaCase("required", {"type": "object", "required": ["x"]}, [{"x": 1}, {"x": 1, "y": 2}], [{}, {"y": 2}]),
    SchemaCase("required", _object({"a": False}, "a"), refused="no value satisfies"),
    SchemaCase("required", {"type": "object", "required": "a"}, refused="`required` must be a list of strings"),
    SchemaCase("additionalProperties", _object({"a": NULL}, additionalProperties=False), [{"a": None}], [{"b": None}]),
    SchemaCase(
        "additionalProperties",
        _object({"a": NULL}, additionalProperties={"type": "integer"}),
        [{"a": None, "b": 1, "c": 2}, {"b": 1}],
        [{"b": None}, {"a": 1}],
    ),
    SchemaCase(
        "additionalProperties",
        {"allOf": [_object({"a": NULL}, additionalProperties=False), {"properties": {"b": NULL}}]},
        [{}, {"a": None}],
        [{"b": None}],
    ),
    SchemaCase(
        "patternProperties",
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        [{}, {"x1": 1, "y": "a"}],
        [{"x1": "a"}, {"y": 1}],
    ),
    SchemaCase(
        "patternProperties",
        _object({"xa": {"minimum": 5}}, patternProperties={"^x": {"type": "integer"}}),
        [{"xa": 5, "xb": 1}, {}],
        [{"xa": 4}, {"xa": "a"}, {"y": 1}],
    ),
    SchemaCase(
        "patternProperties",
        {"type": "object", "patternProperties": {"a": NULL, "b": NULL}},
        refused="not disjoint",
    ),
    SchemaCase("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}, refused="`propertyNames`"),
    SchemaCase("propertyNames", {"type": "object", "propertyNames": {"type": "string"}}, [{"a": 1}]),
    SchemaCase(
        "propertyNames",
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/colour"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"colour": {"type": "string", "enum": ["red", "blue"]}},
        },
        [{}, {"red": 1, "blue": 2}, {"blue": 1}],
        [{"green": 1}, {"red": "a"}],
    ),
    SchemaCase(
        "propertyNames", _object({"a": NULL, "b": NULL}, propertyNames={"enum": ["b"]}), [{"b": None}], [{"a": None}]
    ),
    SchemaCase("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    SchemaCase(
        "minProperties", {"type": "object", "minProperties": 2}, refused="`minProperties` of 2 is not supported"
    ),
    SchemaCase(
        "minProperties",
        _object({"a": NULL, "b": NULL}, minProperties=1, additionalProperties=False),
        [{"a": None}, {"b": None}, {"a": None, "b": None}],
        [{}],
    ),
    SchemaCase(
        "minProperties", _object({"a": NULL, "b": NULL}, minProperties=2), [{"a": None, "b": None}], [{"a": None}]
    ),
    SchemaCase(
        "minProperties",
        _object({"a": NULL, "b": False}, minProperties=2),
        refused="`minProperties` of 2 is not supported",
    ),
    SchemaCase("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    SchemaCase(
        "maxProperties", _object({"a": NULL, "b": NULL}, "b", maxProperties=1), [{"b": None}], [{}, {"a": None}]
    ),
    SchemaCase("maxProperties", _object({"a": NULL, "b": NULL}, "b", maxProperties=0), refused="no value satisfies"),
    SchemaCase(
        "dependentRequired",
        _object({"a": NULL, "b": NULL}, dependentRequired={"a": ["b"]}),
        [{}, {"b": None}, {"a": None, "b": None}],
        [{"a": None}],
    ),
    SchemaCase("dependentSchemas", {"type": "object", "dependentSchemas": {"a": False}}, refused="`dependentSchemas`"),
    SchemaCase("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}, refused="`dependencies`"),
    SchemaCase("unevaluatedProperties", _object({}, unevaluatedProperties=False), refused="`unevaluatedProperties`"),
    # Combinations.
    SchemaCase(
        "allOf",
        {"allOf": [_object({"a": {"type": "integer"}}, "a"), _object({"a": {"minimum": 3}, "b": NULL}, "b")]},
        [{"a": 3, "b": None}],
        [{"a": 2, "b": None}, {"a": 3}],
    ),
    SchemaCase("allOf", {"allOf": [{"type": "string"}, {"type": "integer"}]}, refused="no value satisfies"),
    SchemaCase("anyOf", {"anyOf": [{"type": "integer", "maximum": 3}, {"const": "a"}, False]}, [3, "a"], [4, "b"]),
    SchemaCase(
        "anyOf",
        _object({"a": NULL, "b": NULL}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": None}, {"b": None}, {"a": None, "b": None}],
        [{}],
    ),
    SchemaCase("anyOf", {"anyOf": [False, False]}, refused="no value satisfies"),
    SchemaCase(
        "oneOf",
        {
            "oneOf": [{"type": "integer", "minimum": 1, "maximum": 3}, {"$ref": "#/$defs/l"}],
            "$defs": {"l": {"items": NULL}},
        },
        refused="`oneOf` is not supported",  # 1 satisfies both: `items` speaks of arrays alone
    ),
    SchemaCase(
        "oneOf",
        {
            "oneOf": [{"type": "integer", "minimum": 1, "maximum": 3}, {"$ref": "#/$defs/list"}],
            "$defs": {"list": {"type": "array", "items": NULL}},
        },
        [1, 3, [], [None]],
        [0, 4, [1], None],
    ),
    SchemaCase(
        "oneOf",
        {"oneOf": [_object({"k": {"const": "x"}, "v": NULL}, "k"), _object({"k": {"const": "y"}, "w": NULL}, "k")]},
        [{"k": "x", "v": None}, {"k": "y"}],
        [{"k": "x", "w": None}, {"k": "z"}, {}],
    ),
    SchemaCase(
        "oneOf", {"oneOf": [_object({"a": NULL}, "a"), _object({"b": NULL}, "b")]}, [{"a": None}, {"b": None}], [{}]
    ),
    SchemaCase(
        "oneOf",
        {
            "oneOf": [
                _object({"a": NULL, "c": NULL}, "a", "c"),
                # Answers hold a and b alone, but a and c satisfy it too.
                _object({"a": NULL, "b": NULL}, minProperties=2),
            ]
        },
        refused="`oneOf` is not supported",
    ),
    SchemaCase("oneOf", {"oneOf": [{"type": "integer", "minimum": 5}, {"const": 3}]}, [5, 3], [4]),
    SchemaCase("oneOf", {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}, {"const": 1}]}, ["a", "b", 1], ["c"]),
    SchemaCase("oneOf", {"oneOf": [{"type": "integer"}, {"minimum": 3}]}, refused="`oneOf` is not supported"),
    SchemaCase("not", {"type": ["integer", "null"], "not": {"type": "string"}}, [1, None], ["a"]),
    SchemaCase("not", {"type": "integer", "not": {"const": 3}}, refused="`not` is not supported"),
    SchemaCase(
        "if", {"type": "integer", "if": {"minimum": 3}, "then": {"multipleOf": 2}}, refused="`if` is not supported"
    ),
    SchemaCase("then", {"type": "integer", "then": False}, [1], ["a"]),
    SchemaCase("else", {"type": "integer", "else": False}, [1], ["a"]),
    # References.
    SchemaCase("$ref", TREE, [{"value": 1}, {"value": 1, "next": {"value": 2, "next": None}}], [{"next": None}]),
    SchemaCase("$ref", _object({"child": {"$ref": "#"}}), [{}, {"child": {"child": {}}}], [{"child": 1}]),
    SchemaCase("$ref", _object({"child": {"$ref": "#"}}, "child"), refused="no value satisfies"),
    SchemaCase("$ref", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": NULL}}, [None], [1]),
    SchemaCase("$ref", {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, [3], [2, "a"]),
    SchemaCase("$ref", {"$ref": "#/$defs/none"}, refused="leads nowhere"),
    SchemaCase("$ref", {"$ref": "https://example.com/schema.json"}, refused="nothing is fetched"),
    SchemaCase("$ref", {"$ref": "#"}, refused="leads back to itself"),
    SchemaCase("$anchor", {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, [1], [2]),
    SchemaCase("$defs", {"$defs": {"unused": {"uniqueItems": True}}, "type": "null"}, [None], [1]),
    SchemaCase("definitions", {"$ref": "#/definitions/a", "definitions": {"a": NULL}}, [None], [1]),
    SchemaCase("$dynamicRef", {"$dynamicRef": "#a"}, refused="`$dynamicRef` is not supported"),
    SchemaCase("$dynamicAnchor", {"$dynamicAnchor": "a", "type": "null"}, refused="`$dynamicAnchor` is not supported"),
    SchemaCase(
        "$id", {"$id": "https://a.example/s", "$ref": "https://a.example/s#/$defs/a", "$defs": {"a": NULL}}, [None], [1]
    ),
    SchemaCase("$id", _object({"a": {"$id": "b", "type": "null"}}), refused="`$id` inside a schema"),
    # What says something, and forbids nothing.
    SchemaCase("$schema", {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "null"}, [None], [1]),
    SchemaCase("$vocabulary", {"$vocabulary": {}, "type": "null"}, [None], [1]),
    SchemaCase("$comment", {"$comment": '}"\n', "type": "null"}, [None], [1]),
    *(
        SchemaCase(keyword, {keyword: value, "type": "string", "maxLength": 2}, ["ab"], ["abc", 1])
        for keyword, value in (
            ("title", '"}\n%json'),
            ("description", 'a "quoted" {brace}\nand a line'),
            ("default", 5),
            ("deprecated", True),
            ("readOnly", True),
            ("writeOnly", True),
            ("examples", ["x", 1]),
            ("contentEncoding", "base64"),
            ("contentMediaType", "application/json"),
            ("contentSchema", {"uniqueItems": True}),
            ("x-of-mine", {"a": 1}),
        )
    ),
]

_NAMES = ("a", "b", "name", "é x", '"q"', "item_2")
_PATTERNS = ("^[a-d]+$", "x", "^\\d{2,4}$", "^(yes|no)$", "\\.", "^[^a]*$")
_FORMATS = ("date", "date-time", "email", "ipv4", "uuid", "time", "hostname", "password")
_CONSTANTS = ("a", "b", "", 0, 1, -3, 2.5, True, False, None, [1, "a"], {"k": None}, "longer text")
_REFUSED = (
    {"uniqueItems": True},
    {"contains": {"type": "null"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"propertyNames": {"pattern": "^a"}},
    {"unevaluatedProperties": False},
    {"dependentSchemas": {"a": {"minProperties": 2}}},
)


def random_schema(rng: Random) -> dict[str, Any]:
    """A schema of any keywords in any combination. Few cannot be satisfied, some are refused, four of five are fine."""
    writer = _Writer(rng)
    schema = writer.schema(3) if rng.random() < 0.3 else writer.object(3)
    definitions = {name: writer.schema(2) for name in sorted(writer.used)}
    for name in sorted(writer.used - definitions.keys()):
        definitions[name] = writer.scalar()
    return schema | {"$defs": definitions} if definitions else schema


class _Writer:
    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.used: set[str] = set()

    def schema(self, depth: int) -> dict[str, Any]:
        kind = self.rng.random()
        if depth > 0 and kind < 0.25:
            found = self.object(depth)
        elif depth > 0 and kind < 0.45:
            found = self.array(depth)
        elif depth > 0 and kind < 0.65:
            found = self.combination(depth)
        elif depth > 0 and kind < 0.72:
            name = self.rng.choice(("first", "second"))
            self.used.add(name)
            found = {"$ref": f"#/$defs/{name}"}
        else:
            found = self.scalar()
        if self.rng.random() < 0.3:
            found["description"] = self.rng.choice(("plain", 'with "quotes" and {braces}\n', "#/$defs/none"))
        if self.rng.random() < 0.015:
            found |= self.rng.choice(_REFUSED)
        return found

    def scalar(self) -> dict[str, Any]:
        return self.rng.choice((self.string, self.string, self.number, self.number, self.literal, self.plain))()

    def plain(self) -> dict[str, Any]:
        return {"type": self.rng.choice(("null", "boolean", "integer", "number", "string", ["string", "null"]))}

    def literal(self) -> dict[str, Any]:
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(_CONSTANTS)}
        return {"enum": self.rng.sample(_CONSTANTS, self.rng.randint(1, 5))}

    def string(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        how = self.rng.random()
        if how < 0.35:
            found["pattern"] = self.rng.choice(_PATTERNS)
        elif how < 0.55:
            return found | {"format": self.rng.choice(_FORMATS)}
        if self.rng.random() < 0.5:
            found["minLength"] = self.rng.randint(0, 4)
        if self.rng.random() < 0.7:
            found["maxLength"] = self.rng.randint(4, 30)
        return found

    def number(self) -> dict[str, Any]:
        is_integer = self.rng.random() < 0.5
        found: dict[str, Any] = {"type": "integer" if is_integer else "number"}
        low = self.rng.choice((-100, -1, 0, 0, 1, 17)) if is_integer else self.rng.choice((-2.5, 0, 0.125, 3))
        if self.rng.random() < 0.6:
            found[self.rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self.rng.random() < 0.6:
            found[self.rng.choice(("maximum", "exclusiveMaximum"))] = low + self.rng.choice((1, 2.5, 100, 1e6))
        if self.rng.random() < 0.3:
            # Steps that a float64 holds exactly: whoever checks the answers divides floats.
            found["multipleOf"] = self.rng.choice((1, 2, 7) if is_integer else (0.5, 0.25, 2.5, 1))
        return found

    def array(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "array"}
        if self.rng.random() < 0.8:
            found["items"] = self.schema(depth - 1) if self.rng.random() < 0.9 else self.rng.random() < 0.5
        if self.rng.random() < 0.3:
            found["prefixItems"] = [self.schema(depth - 1) for _ in range(self.rng.randint(1, 2))]
        if self.rng.random() < 0.5:
            found["minItems"] = self.rng.randint(0, 2)
        if self.rng.random() < 0.8:
            found["maxItems"] = self.rng.randint(1, 4)
        return found

    def object(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(_NAMES, self.rng.randint(1, 4))
        found: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth - 1) for name in names}}
        if self.rng.random() < 0.7:
            found["required"] = self.rng.sample(names, self.rng.randint(0, len(names)))
        extra = self.rng.random()
        if extra < 0.35:
            found["additionalProperties"] = False
        elif extra < 0.45:
            found["additionalProperties"] = self.schema(0)
        elif extra < 0.5:
            found["patternProperties"] = {"^x_": self.schema(0)}
        if self.rng.random() < 0.06:
            found["minProperties"] = self.rng.randint(1, 2)
        if self.rng.random() < 0.06:
            found["maxProperties"] = self.rng.randint(1, 4)
        if len(names) > 1 and self.rng.random() < 0.1:
            found["dependentRequired"] = {names[0]: [names[1]]}
        return found

    def combination(self, depth: int) -> dict[str, Any]:
        how = self.rng.random()
        if how < 0.5:
            return {"anyOf": [self.schema(depth - 1) for _ in range(self.rng.randint(1, 3))]}
        if how < 0.7:
            return {
                "oneOf": [self.object(depth - 1), self.array(depth - 1), {"type": "null"}][: self.rng.randint(1, 3)]
            }
        if how < 0.8:
            return {"allOf": [self.number(), {"minimum": 0}], "title": "all"}
        if how < 0.9:
            return self.object(depth - 1) | {"allOf": [{"properties": {"b": self.schema(0)}}]}
        return self.number() | {"not": {"type": "string"}}
