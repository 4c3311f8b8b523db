"""Constraints on an answer's text as requests name them: TGI's `grammar`, OpenAI's `response_format`, and `guided_*`.

Readers of shapes alone: they know no engine, and leave to the checker whether a grammar can be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tgi.errors import InvalidRequest
from tgi.router.validation.json_schema import enforceable
from tgi.router.validation.schema_site import Refused
from tgi.router.validation.structural_tag import structural_tag_grammar

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]

MAX_SOURCE = 256 * 1024
"""Characters of a grammar. Ten thousand choices fit, and any schema that somebody wrote by hand."""

MAX_CHOICES = 10_000

EMBEDDED_EFFORT = 0.2
"""Schemas within a grammar are read on the event loop: 80 ms at worst, where a worker's thread may take 400."""


@dataclass(frozen=True, slots=True)
class GrammarWish:
    """What a request asks for, not yet checked. `param` is the request's field to blame."""

    kind: GrammarKind
    value: Any  # json_schema: dict or bool; regex, lark: text; choice: tuple of texts; json_object: None
    param: str


def native_grammar(grammar: Mapping[str, Any], param: str = "grammar") -> GrammarWish:
    """TGI's tagged object {"type": T, "value": V}. Raises InvalidRequest."""
    kind, value = grammar.get("type"), grammar.get("value")
    if kind not in ("json", "json_object", "json_schema", "regex"):
        raise InvalidRequest(
            f"`{param}.type` must be one of `json`, `json_object`, `json_schema` and `regex`. Given: {_short(kind)}",
            param,
        )
    if value is None:
        raise InvalidRequest(f"`{param}` has no `value`", param)
    if kind == "regex":
        return _regex(value, param)
    if kind == "json_schema":
        value = _nested_schema(value, f"{param}.value", param)
    return _json_schema(value, param)


def response_format_grammar(response_format: Mapping[str, Any], param: str = "response_format") -> GrammarWish | None:
    """OpenAI's three types, and TGI's tagged object in the same place; None for free text. Raises InvalidRequest."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if response_format.get("value") is not None:
        return native_grammar(response_format, param)
    if kind == "json_object":
        # Some clients put the schema beside the type.
        schema = response_format.get("schema")
        return GrammarWish("json_object", None, param) if schema is None else _json_schema(schema, param)
    if kind == "json_schema":
        return _json_schema(_nested_schema(response_format.get("json_schema"), f"{param}.json_schema", param), param)
    if kind in ("json", "regex"):
        raise InvalidRequest(f"`{param}` has no `value`", param)
    raise InvalidRequest(
        f"`{param}.type` must be one of `text`, `json_object`, `json_schema`, `json`, `regex`. Given: {_short(kind)}",
        param,
    )


def guided_grammar(
    guided_json: Any = None,
    guided_regex: Any = None,
    guided_choice: Any = None,
    guided_grammar: Any = None,
    structured_outputs: Any = None,
    other: GrammarWish | None = None,
) -> GrammarWish | None:
    """The extension fields, of which a request may use one, and none beside `other`. Raises InvalidRequest.

    `other` is what the request asks for elsewhere, its `response_format`: the result when no extension is used.
    """
    asked: list[tuple[str, Callable[[Any, str], GrammarWish | None], Any]] = [
        ("guided_json", _json_schema, guided_json),
        ("guided_regex", _regex, guided_regex),
        ("guided_choice", _choice, guided_choice),
        ("guided_grammar", _lark, guided_grammar),
        *_structured(structured_outputs),
    ]
    wishes = [] if other is None else [other]
    wishes += [wish for param, read, value in asked if value is not None and (wish := read(value, param)) is not None]
    if len(wishes) > 1:
        first, second = wishes[0].param, wishes[1].param
        raise InvalidRequest(f"`{first}` and `{second}` exclude each other: an answer follows one grammar", second)
    return wishes[0] if wishes else None


def prepare_schema(schema: Any, param: str) -> str:
    """A JSON schema (object, boolean, or text of one) as JSON text that Lark's `%json` enforces to the letter.

    Raises InvalidRequest for a keyword that cannot be enforced, and for a schema that no value satisfies. Patterns are
    left for the checker of the whole grammar. Plain Python, about 1 ms for ten properties when they are new.
    """
    wish = _json_schema(schema, param)
    try:
        source = json.dumps(wish.value, ensure_ascii=False)
        _check_size(source, param)
        return _kept_source(source)
    except RecursionError:
        raise not_valid("it is nested too deeply", param) from None
    except Refused as refused:
        raise not_valid(refused, param) from None


def schema_source(source: str, effort: float = 1.0) -> str:
    """The JSON text of a schema -> that of one which is enforced. Raises Refused."""
    return json.dumps(enforceable(json.loads(source), effort), ensure_ascii=False, separators=(",", ":"))


@lru_cache(64)
def _kept_source(source: str) -> str:
    """Tools come with the same schemas turn after turn."""
    return schema_source(source, EMBEDDED_EFFORT)


def not_valid(detail: object, param: str) -> InvalidRequest:
    """In TGI's words."""
    return InvalidRequest(f"grammar is not valid: {detail}", param)


def _json_schema(value: Any, param: str) -> GrammarWish:
    if isinstance(value, str):
        _check_size(value, param)
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise not_valid(f"the schema is no JSON: {error}", param) from None
    if not isinstance(value, (dict, bool)):
        raise InvalidRequest("grammar is not supported", param)
    return GrammarWish("json_schema", value, param)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _nested_schema(value: Any, name: str, param: str) -> Any:
    if not isinstance(value, dict) or value.get("schema") is None:
        raise InvalidRequest(f"`{name}` must be an object with a `schema`", param)
    return value["schema"]


def _regex(value: Any, param: str) -> GrammarWish:
    return GrammarWish("regex", _text(value, param), param)


def _lark(value: Any, param: str) -> GrammarWish:
    """Schemas inside are made enforceable as any other."""
    text, parts, end = _text(value, param), [], 0
    while (found := text.find("%json", end)) >= 0:
        begins = found + len("%json")
        begins += len(text[begins:]) - len(text[begins:].lstrip())
        parts.append(text[end:found])
        try:
            schema, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, begins)
        except (ValueError, RecursionError) as error:
            raise not_valid(f"no JSON behind `%json`: {error}", param) from None
        parts.append("%json " + prepare_schema(schema, param))
    return GrammarWish("lark", "".join([*parts, text[end:]]), param)


def _structural_tag(value: Any, param: str) -> GrammarWish:
    return GrammarWish("lark", structural_tag_grammar(value, param, prepare_schema), param)


def _choice(value: Any, param: str) -> GrammarWish:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(f"`{param}` must be a list of strings, none of them empty", param)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"`{param}` supports up to {MAX_CHOICES} choices. Given: {len(value)}", param)
    return GrammarWish("choice", tuple(dict.fromkeys(value)), param)


def _json_object(value: Any, param: str) -> GrammarWish | None:
    return GrammarWish("json_object", None, param) if value else None


def _refuse_given(value: Any, param: str) -> GrammarWish | None:
    if value:
        raise InvalidRequest(f"`{param}` is not supported by this server; leave it out", param)
    return None


def _structured(value: Any) -> list[tuple[str, Callable[[Any, str], GrammarWish | None], Any]]:
    """vLLM's object, one kind of constraint a key. Options of one engine are refused: they would change the answer."""
    if value is None:
        return []
    param = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"`{param}` must be an object", param)
    readers = {
        "json": _json_schema,
        "json_object": _json_object,
        "regex": _regex,
        "choice": _choice,
        "grammar": _lark,
        "structural_tag": _structural_tag,
    }
    return [(f"{param}.{key}", readers.get(key, _refuse_given), one) for key, one in value.items()]


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"`{param}` must be a text that is not empty", param)
    _check_size(value, param)
    return value


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_SOURCE:
        raise not_valid(f"it has {len(text)} characters, at most {MAX_SOURCE} are checked", param)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
