"""Checkpoint's quantisation -> scheme. The only list of what is supported."""

from __future__ import annotations

from tgi.errors import StartupError
from tgi.server.ops.dispatch import Ops
from tgi.server.quantization.scheme import Scheme
from tgi.server.quantization.unquantized import Unquantized


def select_scheme(quant_method: str | None, ops: Ops) -> Scheme:
    """`quant_method`: config.json's quantization_config. Raises StartupError naming one that cannot be served."""
    if quant_method is None:
        return Unquantized(ops)
    raise StartupError(
        f"the checkpoint is quantised with {quant_method!r}, which is not supported; take the model's unquantised "
        "weights (or a GGUF file)"
    )
