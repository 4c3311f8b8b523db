"""Can an answer written for one schema satisfy another one too? Proofs that it cannot; no proof is a refusal.

`oneOf` and `not` are enforced by such proofs alone: what is written for one member must satisfy no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tgi.router.validation.schema_literals import common_literals, type_of
from tgi.router.validation.schema_numbers import number_range
from tgi.router.validation.schema_shapes import ObjectShape, array_shape, object_shape, property_sites, required_names
from tgi.router.validation.schema_site import Case, Refused, Site, common_types, is_one_of, meet_types, written_types
from tgi.router.validation.schema_strings import string_limits

MAX_DEPTH = 4
"""Of properties in properties that are compared."""


class Overlap:
    """Of one schema. `cases` gives the ways to satisfy some places together."""

    def __init__(self, cases: Callable[[Sequence[Site]], list[Case]], max_comparisons: int) -> None:
        self._cases = cases
        self._max_comparisons = max_comparisons
        self._num_comparisons = 0
        self._shapes: dict[tuple[str, ...], ObjectShape | None] = {}

    def check_denied(self, case: Case) -> None:
        """Raises Refused unless whatever is written for `case` satisfies none of its denied places."""
        for site in case.denied:
            if not all(self._apart(case, other, MAX_DEPTH) for other in self._cases([site])):
                keyword = "not" if site.path.endswith("/not") else "oneOf"
                reason = "it cannot be told that what is written" + (
                    " does not satisfy it"
                    if keyword == "not"
                    else " satisfies one member only; `anyOf` has no such limit"
                )
                raise Refused(f"this `{keyword}` is not supported: {reason}", site.path)

    def _apart(self, written: Case, other: Case, depth: int) -> bool:
        """Does nothing that is written for `written` satisfy `other`?"""
        self._num_comparisons += 1
        if self._num_comparisons > self._max_comparisons:
            raise Refused("`oneOf` and `not` need too many comparisons")
        literals = common_literals(written.sites)
        if literals is not None:
            return not any(self._may_satisfy(value, other) for value in literals)
        literals = common_literals(other.sites)
        if literals is not None:
            return not any(self._may_satisfy(value, written) for value in literals)
        wanted = common_types(other.sites)
        return all(
            self._apart_as(kind, written, other, depth)
            for kind in written_types(written.sites)
            if meet_types(frozenset([kind]), wanted)
        )

    def _apart_as(self, kind: str, written: Case, other: Case, depth: int) -> bool:
        if kind in ("integer", "number"):
            return _numbers_apart(written, other)
        if kind == "string":
            first, second = string_limits(written.sites), string_limits(other.sites)
            return _lengths_apart(first.min_length, first.max_length, second.min_length, second.max_length)
        if kind == "array":
            return _arrays_apart(written, other)
        return kind == "object" and self._objects_apart(written, other, depth)

    def _objects_apart(self, written: Case, other: Case, depth: int) -> bool:
        """By one property: that the other needs and this never has, or the reverse, or whose values are apart."""
        shape = self._shape(written)
        if shape is None:
            return True
        if shape.patterns:
            return False
        # Of the other, what its schemas say; what is left out of answers, though they allow it, satisfies it too.
        for name in dict.fromkeys((*shape.required, *required_names(other.sites))):
            mine = shape.properties.get(name, shape.additional)
            if mine is None:
                return True
            if depth and self._values_apart(mine, property_sites(other.sites, name), depth - 1):
                return True
        return False

    def _shape(self, case: Case) -> ObjectShape | None:
        key = tuple(site.path for site in case.sites)
        if key not in self._shapes:
            self._shapes[key] = object_shape(case.sites)
        return self._shapes[key]

    def _values_apart(self, mine: Sequence[Site], theirs: Sequence[Site], depth: int) -> bool:
        return all(self._apart(one, two, depth) for one in self._cases(mine) for two in self._cases(theirs))

    def _may_satisfy(self, value: Any, other: Case) -> bool:
        """False only where it is sure that it does not."""
        kind = type_of(value)
        if not is_one_of(kind, common_types(other.sites)):
            return False
        literals = common_literals(other.sites)
        if literals is not None and value not in literals:
            return False
        if kind in ("integer", "number"):
            return number_range(other.sites, False).holds(value)
        if kind == "string":
            limits = string_limits(other.sites)
            return not _lengths_apart(len(value), len(value), limits.min_length, limits.max_length)
        if kind == "object":
            return all(name in value for name in required_names(other.sites))
        return True


def _numbers_apart(written: Case, other: Case) -> bool:
    first, second = number_range(written.sites, False), number_range(other.sites, False)
    for low, low_open, high, high_open in (
        (first.low, first.low_open, second.high, second.high_open),
        (second.low, second.low_open, first.high, first.high_open),
    ):
        if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
            return True
    return False


def _lengths_apart(low: int, high: int | None, other_low: int, other_high: int | None) -> bool:
    return (high is not None and high < other_low) or (other_high is not None and other_high < low)


def _arrays_apart(written: Case, other: Case) -> bool:
    first, second = array_shape(written.sites), array_shape(other.sites)
    if first is None or second is None:
        return True
    return _lengths_apart(first.min_items, first.max_items, second.min_items, second.max_items)
