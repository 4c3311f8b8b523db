"""Gated MLP: down(act(gate(x)) * up(x)), gate and up as one product."""

from __future__ import annotations

import torch

from tgi.errors import StartupError
from tgi.server.layers.linear import MergedColumnLinear, RowLinear
from tgi.server.layers.source import Source

# config.json's hidden_act -> op.
GATED_ACTIVATIONS = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
    "gelu_fast": "gelu_tanh_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "relu": "relu_and_mul",
}


class GatedMLP:
    def __init__(
        self, source: Source, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False
    ) -> None:
        if activation not in GATED_ACTIVATIONS:
            known = ", ".join(GATED_ACTIVATIONS)
            raise StartupError(f"hidden_act {activation!r} is not supported; {known} are")
        self._act_and_mul = getattr(source.ops, GATED_ACTIVATIONS[activation])
        self._gate_up = MergedColumnLinear(
            source, "gate_up_proj", hidden_size, [intermediate_size, intermediate_size], bias=bias
        )
        self._down = RowLinear(source, "down_proj", intermediate_size, hidden_size, bias=bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._down(self._act_and_mul(self._gate_up(hidden)))
