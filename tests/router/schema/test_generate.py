from __future__ import annotations

from typing import get_type_hints

import msgspec
import pytest

from tgi.router.schema.chat import ChatRequest, Message
from tgi.router.schema.generate import ABSENT_PARAMETERS, CompatRequest, GenerateParameters, GenerateRequest


@pytest.mark.parametrize(
    ("wanted", "required"),
    [
        (GenerateParameters, {}),
        (GenerateRequest, {"inputs": "x"}),
        (CompatRequest, {"inputs": "x"}),
        (ChatRequest, {"messages": []}),
        (Message, {"role": "user"}),
    ],
)
def test_null_is_absent_in_every_optional_field(wanted: type[msgspec.Struct], required: dict[str, object]) -> None:
    nulls = {name: None for name in get_type_hints(wanted) if name not in required}
    assert msgspec.convert({**nulls, **required}, wanted) == msgspec.convert(required, wanted)


def test_absent_parameters_sample_and_empty_ones_do_not() -> None:
    assert msgspec.convert({"inputs": "x"}, GenerateRequest).wanted is ABSENT_PARAMETERS
    assert msgspec.convert({"inputs": "x", "parameters": None}, GenerateRequest).wanted.do_sample is True
    assert msgspec.convert({"inputs": "x", "parameters": {}}, GenerateRequest).wanted.do_sample is None
