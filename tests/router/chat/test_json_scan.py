from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.router.chat.json_scan import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def scan(pieces: list[str]) -> tuple[int, JsonScanner]:
    """Characters that belong to the value, and the scanner after them."""
    scanner = JsonScanner()
    length = 0
    for piece in pieces:
        taken = scanner.feed(piece)
        length += taken
        if taken < len(piece) or scanner.complete:
            break
    return length, scanner


@given(
    value=VALUES, ascii=st.booleans(), indent=st.sampled_from([None, 1]), rest=st.sampled_from([",", "} x", "]", "\n1"])
)
def test_any_value_ends_where_it_ends(value: Any, ascii: bool, indent: int | None, rest: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    for pieces in ([text + rest], list(text + rest)):
        length, scanner = scan(pieces)
        assert scanner.complete
        assert length == len(text)


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": "b', '{"a\\', "[", '"', '{"a": [{}'])
def test_an_unfinished_value_waits_for_more(text: str) -> None:
    length, scanner = scan([text])
    scanner.finish()
    assert (length, scanner.complete, scanner.broken) == (len(text), False, False)


def test_only_its_end_completes_a_number() -> None:
    _, scanner = scan(["12"])
    assert not scanner.complete
    scanner.finish()
    assert scanner.complete


@pytest.mark.parametrize(
    ("text", "length"), [("<", 0), ("", 0), ("}", 0), ('{"a": <', 6), ("[1}", 2), ("{'a'", 1), ('{"a": {"b": 1]', 13)]
)
def test_what_cannot_stand_in_a_value_breaks_it(text: str, length: int) -> None:
    taken, scanner = scan([text])
    assert (taken, scanner.broken) == (length, bool(text))


def test_almost_json_passes() -> None:
    for text in ('{"a": True, }', "[NaN, -Infinity]", '{"a" 1}', '{"a": "two\nlines"}'):
        length, scanner = scan([text])
        assert (length, scanner.complete) == (len(text), True)
