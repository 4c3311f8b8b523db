"""Places in a JSON schema: what stands there, where a reference leads, and which keywords nobody enforces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from tgi.router.validation.schema_site import JSON_TYPES, Refused, Site

MAX_DEPTH = 64
"""Of nested values in the text of a schema."""

ANNOTATIONS = {
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "$vocabulary",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "else",
    "examples",
    "id",
    "if",
    "maxContains",
    "minContains",
    "readOnly",
    "then",
    "title",
    "writeOnly",
}
"""No assertions: JSON Schema lets them say something about a value, but forbid none. `if` needs a `then` or `else`."""

# Keyword -> the values with which it asks for nothing. With any other it is refused.
_NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "$dynamicAnchor": (),
    "$dynamicRef": (),
    "$recursiveAnchor": (False,),
    "$recursiveRef": (),
    "contains": (),
    "dependencies": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")


class Document:
    """One schema as its request sent it. Raises Refused for what is no schema."""

    def __init__(self, schema: Any) -> None:
        if not isinstance(schema, (dict, bool)):
            raise Refused("a JSON schema must be an object or a boolean")
        _check_depth(schema)
        self.root = Site("#", schema)
        self._anchors: dict[str, Site] | None = None
        self._id = schema.get("$id", schema.get("id")) if isinstance(schema, dict) else None
        draft = schema.get("$schema") if isinstance(schema, dict) else None
        self._is_old = isinstance(draft, str) and any(name in draft for name in _OLD_DRAFTS)

    def check(self, site: Site) -> None:
        """Raises Refused for the first keyword at `site` that is malformed or not enforced."""
        if not isinstance(site.schema, dict):
            raise Refused("a schema must be an object or a boolean", site.path)
        for keyword, value in site.schema.items():
            harmless = _NOT_ENFORCED.get(keyword)
            if harmless is None:
                self._check_shape(keyword, value, site)
            elif keyword == "propertyNames" and self.listed_names(site) is not None:
                continue
            elif not any(value == neutral and type(value) is type(neutral) for neutral in harmless):
                raise Refused(f"`{keyword}` is not supported", site.path)
        if "if" in site.schema and ("then" in site.schema or "else" in site.schema):
            raise Refused("`if` is not supported", site.path)

    def _check_shape(self, keyword: str, value: Any, site: Site) -> None:
        fits, wanted = _SHAPES.get(keyword, _ANYTHING)
        if not fits(value):
            raise Refused(f"`{keyword}` must be {wanted}", site.path)
        if keyword == "prefixItems" and (self._is_old or isinstance(site.schema.get("items"), list)):
            raise Refused("`prefixItems` does not exist in the draft of this schema", site.path)
        if keyword == "$id" and site.path != "#" and not str(value).startswith("#"):
            raise Refused("`$id` inside a schema is not supported", site.path)

    def listed_names(self, site: Site) -> list[str] | None:
        """The names that `propertyNames` allows, where it lists them; None where it says something else."""
        schema = self.followed(site.at("propertyNames")).schema
        if not isinstance(schema, dict) or not schema.keys() - ANNOTATIONS <= {"type", "enum", "const"}:
            return None
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else None

    def followed(self, site: Site) -> Site:
        """Where a site that is nothing but a reference leads; any other site itself."""
        seen: set[str] = set()
        while isinstance(site.schema, dict) and "$ref" in site.schema and site.schema.keys() - ANNOTATIONS == {"$ref"}:
            if site.path in seen:
                raise Refused("a reference leads back to itself", site.path)
            seen.add(site.path)
            self.check(site)
            site = self.resolve(site.schema["$ref"], site)
        return site

    def resolve(self, reference: str, site: Site) -> Site:
        """The place that `$ref` at `site` names. Only places in the schema itself; nothing is fetched."""
        local = reference
        if isinstance(self._id, str) and self._id and reference.startswith(self._id.rstrip("#")):
            local = "#" + reference[len(self._id.rstrip("#")) :].removeprefix("#")
        if local in ("#", "#/"):
            return self.root
        if not local.startswith("#"):
            raise Refused(f"`$ref` to {reference!r} leads out of the schema, and nothing is fetched", site.path)
        if not local.startswith("#/"):
            return self._anchored(local[1:], reference, site)
        place = self.root
        for step in local[2:].split("/"):
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(place.schema, dict) and name in place.schema:
                place = place.at(name)
            elif isinstance(place.schema, list) and name in map(str, range(len(place.schema))):
                place = place.at(int(name))
            else:
                raise Refused(f"`$ref` to {reference!r} leads nowhere", site.path)
        if not isinstance(place.schema, (dict, bool)):
            raise Refused(f"`$ref` to {reference!r} leads to no schema", site.path)
        return place

    def _anchored(self, name: str, reference: str, site: Site) -> Site:
        if self._anchors is None:
            self._anchors = dict(_anchors_in(self.root))
        if name not in self._anchors:
            raise Refused(f"`$ref` to {reference!r} leads nowhere", site.path)
        return self._anchors[name]


def _anchors_in(root: Site) -> Iterator[tuple[str, Site]]:
    waiting = [root]
    while waiting:
        place = waiting.pop()
        if isinstance(place.schema, dict):
            for name in (place.schema.get("$anchor"), place.schema.get("$id")):
                if isinstance(name, str):
                    yield name.removeprefix("#"), place
            waiting += [place.at(key) for key in place.schema]
        elif isinstance(place.schema, list):
            waiting += [place.at(index) for index in range(len(place.schema))]


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise Refused(f"the schema is nested more than {MAX_DEPTH} levels deep")
        level = [
            child
            for value in level
            if isinstance(value, (dict, list))
            for child in (value.values() if isinstance(value, dict) else value)
        ]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_schema_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in JSON_TYPES for kind in kinds)


_Shape = tuple[Callable[[Any], bool], str]
_ANYTHING: _Shape = (lambda value: True, "")
_ONE: _Shape = (_is_schema, "a schema")
_LIST: _Shape = (_is_schema_list, "a list of schemas, not empty")
_MAP: _Shape = (_is_schema_map, "an object of schemas")
_COUNT: _Shape = (_is_count, "a whole number, not negative")
_NUMBER: _Shape = (_is_number, "a number")
_TEXT: _Shape = (lambda value: isinstance(value, str), "a string")

_SHAPES: dict[str, _Shape] = {
    **dict.fromkeys(("additionalItems", "additionalProperties", "not"), _ONE),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("patternProperties", "properties"), _MAP),
    **dict.fromkeys(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), _COUNT),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"), _NUMBER),
    **dict.fromkeys(("$ref", "format", "pattern"), _TEXT),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "items": (lambda value: _is_schema(value) or _is_schema_list(value), "a schema or a list of schemas"),
    "type": (_is_type, f"one or several of {', '.join(JSON_TYPES)}"),
    "required": (_are_texts, "a list of strings"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_are_texts, value.values())),
        "an object of lists of strings",
    ),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list that is not empty"),
}
