"""Places in a JSON schema that hold together, and the types that they leave. Follows no reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

JSON_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

KEYWORDS = {
    "number": {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"},
    "string": {"format", "maxLength", "minLength", "pattern"},
    "array": {"additionalItems", "items", "maxItems", "minItems", "prefixItems"},
    "object": {
        "additionalProperties",
        "dependentRequired",
        "maxProperties",
        "minProperties",
        "patternProperties",
        "properties",
        "propertyNames",
        "required",
    },
}


class Refused(Exception):
    """A schema that is wrong, cannot be satisfied or cannot be enforced. `str()` is one line with the place."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{reason}, at {path}" if path else reason)


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the document, by its JSON pointer, and what stands there."""

    path: str
    schema: Any

    def at(self, *steps: str | int) -> Site:
        found, path = self.schema, self.path
        for step in steps:
            found = found[step]
            path += "/" + str(step).replace("~", "~0").replace("/", "~1")
        return Site(path, found)

    def members(self, keyword: str) -> list[Site]:
        """Of a list of schemas."""
        return [self.at(keyword, index) for index in range(len(self.schema[keyword]))]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to satisfy a schema: all of `sites` hold, each without its references and choices; none of `denied`."""

    sites: tuple[Site, ...] = ()
    denied: tuple[Site, ...] = ()

    def joined(self, other: Case) -> Case:
        known = {site.path for site in self.sites}
        return Case(
            (*self.sites, *(site for site in other.sites if site.path not in known)), (*self.denied, *other.denied)
        )


def said(sites: Sequence[Site], keyword: str) -> Iterator[Any]:
    return (site.schema[keyword] for site in sites if keyword in site.schema)


def common_types(sites: Sequence[Site]) -> frozenset[str]:
    """What `type` leaves; `number` includes the integers, so both together never stand in the answer."""
    types = frozenset(JSON_TYPES) - {"integer"}
    for value in said(sites, "type"):
        types = meet_types(types, frozenset([value] if isinstance(value, str) else value))
    return types


def written_types(sites: Sequence[Site]) -> frozenset[str]:
    """Without a `type`, those whose keywords are used: a schema that speaks of properties is meant for objects."""
    if any("type" in site.schema for site in sites):
        return common_types(sites)
    meant = {kind for kind, keywords in KEYWORDS.items() if any(keywords & site.schema.keys() for site in sites)}
    return frozenset(meant) or common_types(sites)


def meet_types(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    both = set(first & second)
    if ("integer" in first and "number" in second) or ("number" in first and "integer" in second):
        both.add("integer")
    return frozenset(both - {"integer"} if "number" in both else both)


def is_one_of(kind: str, types: frozenset[str]) -> bool:
    return kind in types or (kind == "integer" and "number" in types)
