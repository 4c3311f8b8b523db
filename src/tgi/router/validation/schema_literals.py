"""`const` and `enum`: the values that several schemas leave together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tgi.router.validation.schema_numbers import EXACT, MAX_INTEGER_DIGITS, number_range
from tgi.router.validation.schema_site import KEYWORDS, Refused, Site, is_one_of
from tgi.router.validation.schema_strings import string_limits


def common_literals(sites: Sequence[Site]) -> list[Any] | None:
    """The values that `const` and `enum` leave, in order; None without either."""
    found: dict[str, Any] | None = None
    for site in sites:
        for keyword in ("const", "enum"):
            if keyword not in site.schema:
                continue
            value = site.schema[keyword]
            listed = {same(one): one for one in (value if keyword == "enum" else [value])}
            found = listed if found is None else {key: one for key, one in found.items() if key in listed}
    return None if found is None else [plain_numbers(value, sites[0].path) for value in found.values()]


def same(value: Any) -> str:
    """Equal for values that JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{same(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(same, value)) + "]"
    return json.dumps(value)


def plain_numbers(value: Any, path: str) -> Any:
    """`value` with numbers that are written and read exactly: 2.0 becomes 2. Raises Refused."""
    if isinstance(value, dict):
        return {key: plain_numbers(one, path) for key, one in value.items()}
    if isinstance(value, list):
        return [plain_numbers(one, path) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    if isinstance(value, int) and abs(value) > EXACT:
        raise Refused(f"the number {value} of `const` or `enum` is beyond 2^53", path)
    if isinstance(value, float) and not abs(value) < 10**MAX_INTEGER_DIGITS:
        raise Refused(f"the number {value} of `const` or `enum` is too large", path)
    return value


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def literal_fits(value: Any, types: frozenset[str], sites: Sequence[Site]) -> bool:
    """Is `value` one of `types` and within the bounds beside it? Raises Refused where that cannot be told."""
    kind = type_of(value)
    if not is_one_of(kind, types):
        return False
    if kind in ("integer", "number"):
        return number_range(sites, kind == "integer").holds(value)
    if kind == "string":
        limits = string_limits(sites)
        return limits.min_length <= len(value) <= (len(value) if limits.max_length is None else limits.max_length)
    if kind in ("array", "object"):
        for site in sites:
            for keyword in sorted(KEYWORDS[kind] & site.schema.keys()):
                raise Refused(f"`{keyword}` beside `const` or `enum` is not supported", site.path)
    return True
