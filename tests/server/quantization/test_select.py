"""What a checkpoint may be quantised with."""

from __future__ import annotations

import pytest

from tgi.errors import StartupError
from tgi.server.ops.dispatch import Ops
from tgi.server.quantization.select import select_scheme
from tgi.server.quantization.unquantized import Unquantized


def test_no_method_is_plain_weights() -> None:
    assert isinstance(select_scheme(None, Ops()), Unquantized)


@pytest.mark.parametrize(
    "method",
    [
        *("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4"),
        *("bitsandbytes-fp4", "fp8", "fbgemm_fp8", "unknown"),
    ],
)
def test_a_method_that_is_not_there_is_refused_by_name(method: str) -> None:
    with pytest.raises(StartupError, match=f"quantised with '{method}', which is not supported"):
        select_scheme(method, Ops())
