"""What several schemas say together of a string: lengths, patterns, formats. Compiles no pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tgi.router.validation.schema_site import Refused, Site, said

_MAX_LENGTH = 2**31

# Format -> the longest text that is written. None is not bounded: as any string without `maxLength`.
ENFORCED_FORMATS: dict[str, int | None] = {
    "date": 10,
    "date-time": 35,
    "duration": 40,
    "email": 254,
    "hostname": 253,
    "ipv4": 15,
    "ipv6": 39,
    "time": 24,
    "uri": None,
    "uuid": 36,
}

# JSON Schema's other formats. Any further format is an annotation of somebody's own.
REFUSED_FORMATS = (
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
)


@dataclass(frozen=True, slots=True)
class StringLimits:
    min_length: int
    max_length: int | None
    patterns: tuple[str, ...]
    formats: tuple[str, ...]


def string_limits(sites: Sequence[Site]) -> StringLimits:
    return StringLimits(
        max((int(value) for value in said(sites, "minLength")), default=0),
        min((int(value) for value in said(sites, "maxLength")), default=None),
        tuple(dict.fromkeys(said(sites, "pattern"))),
        tuple(dict.fromkeys(value for value in said(sites, "format") if value in ENFORCED_FORMATS)),
    )


def string_node(sites: Sequence[Site], literal: str | None = None) -> dict[str, Any] | bool:
    """A string type, False where no length is left; or the one `literal`, if the patterns let it pass."""
    limits = string_limits(sites)
    if literal is not None:
        return _with_patterns({"type": "string", "const": literal}, limits.patterns, ())
    for site in sites:
        if site.schema.get("format") in REFUSED_FORMATS:
            raise Refused(f"`format` {site.schema['format']!r} is not supported", site.path)
    high = limits.max_length
    for name in limits.formats:
        longest = ENFORCED_FORMATS[name]
        if longest is not None:
            high = longest if high is None else min(high, longest)
    if high is not None and limits.min_length > high:
        return False
    if max(limits.min_length, high or 0) > _MAX_LENGTH:
        raise Refused(f"`minLength` and `maxLength` above {_MAX_LENGTH} are not supported", sites[0].path)
    node: dict[str, Any] = {"type": "string"}
    if limits.min_length:
        node["minLength"] = limits.min_length
    if high is not None:
        node["maxLength"] = high
    return _with_patterns(node, limits.patterns, limits.formats)


def _with_patterns(node: dict[str, Any], patterns: Sequence[str], formats: Sequence[str]) -> dict[str, Any]:
    """One of each beside the type; the others as members of an allOf, which the engine joins into one expression."""
    more = [{"type": "string", "pattern": pattern} for pattern in patterns[1:]]
    more += [{"type": "string", "format": name} for name in formats[1:]]
    if patterns:
        node["pattern"] = patterns[0]
    if formats:
        node["format"] = formats[0]
    return node | {"allOf": more} if more else node
