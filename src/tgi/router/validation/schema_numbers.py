"""What several schemas say together of a number: its bounds and its step. Exact arithmetic on what the client wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import Any

from tgi.router.validation.schema_site import Refused, Site, said

MAX_INTEGER_DIGITS = 15
MAX_DECIMALS = 9
"""Bounds of numbers that the schema does not bound: a small model would write digits without end. No exponents."""

EXACT = 2**53
"""Beyond, a float64 is not every integer."""

_BIGGEST = 10**MAX_INTEGER_DIGITS
_MAX_STEP = 2**32 - 1  # what llguidance computes multiples in


@dataclass(frozen=True, slots=True)
class NumberRange:
    """`step`: every number is a multiple of it."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False
    step: Fraction | None = None

    def holds(self, number: float) -> bool:
        value = exactly(number)
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        below = self.high is None or value < self.high or (value == self.high and not self.high_open)
        return above and below and (self.step is None or (Fraction(value) / self.step).denominator == 1)


def exactly(number: float) -> Decimal:
    """The decimal that a client wrote: 0.1 is a tenth."""
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def number_range(sites: Sequence[Site], is_integer: bool) -> NumberRange:
    low = max(
        [(exactly(value), False) for value in said(sites, "minimum")]
        + [(exactly(value), True) for value in said(sites, "exclusiveMinimum")],
        default=None,
    )
    high = min(
        [(exactly(value), True) for value in said(sites, "maximum")]
        + [(exactly(value), False) for value in said(sites, "exclusiveMaximum")],
        default=None,
    )
    step = Fraction(1) if is_integer else None
    for value in said(sites, "multipleOf"):
        other = Fraction(exactly(value))
        step = other if step is None else _lcm(step, other)
    return NumberRange(
        low=low[0] if low else None,
        high=high[0] if high else None,
        low_open=bool(low and low[1]),
        high_open=bool(high and not high[1]),
        step=step,
    )


def number_node(sites: Sequence[Site], is_integer: bool) -> dict[str, Any] | bool:
    """A number type with both bounds, inclusive, and a step; False where no number is left."""
    wanted = number_range(sites, is_integer)
    path = next((site.path for site in sites), "#")
    if is_integer or (wanted.step is not None and wanted.step.denominator == 1):
        return _integer_node(wanted, path)
    decimals = _decimals(wanted, path)
    step = Fraction(1, 10**decimals) if wanted.step is None else wanted.step
    reach = 10 ** (MAX_INTEGER_DIGITS - (0 if wanted.step is None else decimals))
    low, high = _clipped(wanted, reach, path)
    first = _steps_above(low, step, wanted.low_open)
    last = _steps_below(high, step, wanted.high_open)
    if first > last:
        if wanted.step is None and (wanted.low is None or wanted.high is None or wanted.low < wanted.high):
            raise Refused(f"no number of at most {decimals} decimals lies within the bounds", path)
        return False
    # llguidance takes an open bound of 0 for a closed one; the next multiple says the same.
    return {
        "type": "number",
        "minimum": float(first * step) if wanted.low_open else _plain(low),
        "maximum": float(last * step) if wanted.high_open else _plain(high),
        "multipleOf": float(step),
    }


def _integer_node(wanted: NumberRange, path: str) -> dict[str, Any] | bool:
    step = wanted.step or Fraction(1)
    if step.denominator != 1 or step > _MAX_STEP:
        raise Refused(f"`multipleOf` comes to {step}, which is too large", path)
    low, high = _clipped(wanted, _BIGGEST - 1, path)
    first = _steps_above(low, step, wanted.low_open) * step
    last = _steps_below(high, step, wanted.high_open) * step
    if first > last:
        return False
    node: dict[str, Any] = {"type": "integer", "minimum": int(first), "maximum": int(last)}
    return node if step == 1 else node | {"multipleOf": int(step)}


def _decimals(wanted: NumberRange, path: str) -> int:
    """How many digits stand behind the point."""
    if wanted.step is not None:
        decimals = 0
        while (wanted.step * 10**decimals).denominator != 1:
            decimals += 1
            if decimals > MAX_DECIMALS:
                raise Refused(f"`multipleOf` has more than {MAX_DECIMALS} decimals", path)
        _check_step(wanted.step, decimals, path)
        return decimals
    # Beside an open bound a number must stay different from it as a float64, which holds 15 digits.
    bounds = [wanted.low if wanted.low_open else None, wanted.high if wanted.high_open else None]
    digits = max((len(str(int(abs(bound)))) for bound in bounds if bound is not None), default=0)
    return max(0, min(MAX_DECIMALS, MAX_INTEGER_DIGITS - digits))


def _check_step(step: Fraction, decimals: int, path: str) -> None:
    """llguidance reads a step by multiplying a float64 by ten until nothing is left behind the point."""
    value, seen = float(step), 0
    while value % 1 and seen <= decimals:
        value, seen = value * 10, seen + 1
    if seen != decimals or value != step * 10**decimals or value > _MAX_STEP:
        raise Refused(f"`multipleOf` of {float(step)} has too many digits", path)


def _clipped(wanted: NumberRange, reach: int, path: str) -> tuple[Decimal, Decimal]:
    """Both bounds: `reach` where the schema has none, at most `_BIGGEST` where it has."""
    for bound in (wanted.low, wanted.high):
        if bound is not None and Fraction(bound) * 10**MAX_INTEGER_DIGITS % 1:
            raise Refused(f"a bound of {bound} has more than {MAX_INTEGER_DIGITS} decimals", path)
    biggest = Decimal(_BIGGEST)
    if (wanted.low is not None and wanted.low > biggest) or (wanted.high is not None and wanted.high < -biggest):
        raise Refused(f"numbers of more than {MAX_INTEGER_DIGITS} digits are not supported", path)
    # A bound beyond `reach` on one side moves that of the other side along.
    low = None if wanted.low is None else max(wanted.low, -biggest)
    high = None if wanted.high is None else min(wanted.high, biggest)
    if low is None:
        low = Decimal(-reach) if high is None or high >= -reach else -biggest
    if high is None:
        high = Decimal(reach) if low <= reach else biggest
    return low, high


def _plain(bound: Decimal) -> float:
    return int(bound) if bound == int(bound) else float(bound)


def _steps_above(low: Decimal, step: Fraction, is_open: bool) -> int:
    count = Fraction(low) / step
    return floor(count) + 1 if is_open else ceil(count)


def _steps_below(high: Decimal, step: Fraction, is_open: bool) -> int:
    count = Fraction(high) / step
    return ceil(count) - 1 if is_open else floor(count)


def _lcm(first: Fraction, second: Fraction) -> Fraction:
    return Fraction(lcm(first.numerator, second.numerator), gcd(first.denominator, second.denominator))
