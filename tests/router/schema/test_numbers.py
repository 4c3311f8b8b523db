from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.router.schema.numbers import shortest_f32


def widened(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def num_digits(spelling: str) -> int:
    return len(spelling.split("e")[0].replace(".", "").strip("-0"))


@pytest.mark.parametrize(
    "value", [-0.34, 0.1, -12.0625, 0.0, -1e-7, 3.4028235e38, 1.1754944e-38, 16777216.0, -0.6931472]
)
def test_known_spellings(value: float) -> None:
    assert shortest_f32(widened(value)) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_json_cannot_say_is_null(value: float) -> None:
    assert shortest_f32(value) is None


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_spelling_names_the_same_float32_and_is_no_longer_than_numpys(value: float) -> None:
    spelled = shortest_f32(value)
    assert spelled is not None
    assert np.float32(spelled) == np.float32(value)
    assert json.loads(repr(spelled)) == spelled
    assert num_digits(repr(spelled)) <= max(num_digits(str(np.float32(value))), 7)
