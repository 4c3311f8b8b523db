"""Which product a weight gets on this CPU, and oneDNN's.

`PanelLinear` where the CPU has AVX-512: without AMX, SmolLM2-135M in bfloat16 on one core takes 20 ms at one row, 25 at
8, 63 at 32 and 880 at 512, oneDNN 26, 41, 96 and 1,334; in float32 32, 39, 67 and 757 against 46, 57, 89 and 786. Its
rows do not depend on the batch either. With AMX bfloat16 is oneDNN's, which is far ahead at many rows.
"""

from __future__ import annotations

import torch

from tgi.server.kernels.cpu.matmul import PanelLinear

# The batch that oneDNN's order is chosen for. Of 1, 8, 32 and none given, 32 was best or equal from 1 to 128 rows.
_ROWS_HINT = 32


class BlockedLinear:
    """A weight in oneDNN's own blocked order: torch would reorder it in every call. `kept`: what it holds on to.

    In plain order where oneDNN has no product for the dtype on this machine.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, float_out: bool = False) -> None:
        self._float_out = float_out
        if _onednn_has(weight.dtype):
            blocked = weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
            product = torch.ops.mkldnn._linear_pointwise.default
            self._apply = lambda inputs: product(inputs, blocked, bias, "none", [], "")
        else:
            self._apply = lambda inputs: torch.nn.functional.linear(inputs, weight, bias)
        self.kept = (weight,) if bias is None else (weight, bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self._apply(inputs)
        return outputs.float() if self._float_out else outputs


def linear(weight: torch.Tensor, bias: torch.Tensor | None, float_out: bool = False) -> BlockedLinear | PanelLinear:
    """As `ops.matmul.linear`."""
    is_onednns = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    kind = PanelLinear if torch.cpu._is_avx512_supported() and not is_onednns else BlockedLinear
    return kind(weight, bias, float_out)


def _onednn_has(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32
