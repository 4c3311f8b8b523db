"""Products with a weight in oneDNN's own blocked order: done once at load, where torch would reorder it in every call.

The copy in plain order can go afterwards. On two cores without AMX a bfloat16 product of 1 to 8 rows takes about half
the time; float32 gains from 4 rows on.
"""

from __future__ import annotations

import torch

from tgi.server.ops.matmul import DenseLinear, LinearKernel

# The batch that the order is chosen for. Measured from 1 to 128 rows: what is best for 32 loses nowhere.
_ROWS_HINT = 32


class BlockedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise
        self.kept = (self._weight,) if bias is None else (self._weight, bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._linear(inputs, self._weight, self._bias, "none", [], "")


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    """As `ops.matmul.linear`; in plain order where oneDNN has no product for the dtype on this machine."""
    return BlockedLinear(weight, bias) if _supports(weight.dtype) else DenseLinear(weight, bias)


def _supports(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32
