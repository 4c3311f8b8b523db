"""Numbers as they appear in JSON: integer ranges of the wire types, and f32 values printed as f32."""

from __future__ import annotations

import struct
from math import isfinite
from typing import Annotated

from msgspec import Meta

UInt = Annotated[int, Meta(ge=0, le=2**63 - 1)]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

_pack_f32 = struct.Struct("f").pack


def shortest_f32(value: float) -> float | None:
    """The float64 whose shortest spelling is that of the float32 `value`: -0.34, not -0.3400000035762787.

    None for what JSON cannot say (NaN, infinities).
    """
    if not isfinite(value):
        return None
    target = _pack_f32(value)
    for digits in (7, 8):
        spelling = float(f"{value:.{digits}g}")
        if _pack_f32(spelling) == target:
            return spelling
    return float(f"{value:.9g}")  # nine digits always name a float32
