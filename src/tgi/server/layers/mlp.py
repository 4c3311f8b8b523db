"""MLPs: gated, down(act(gate(x)) * up(x)) with gate and up as one product; and plain, down(act(up(x)))."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tgi.errors import StartupError
from tgi.server.layers.linear import ColumnLinear, MergedColumnLinear, RowLinear
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
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}


class GatedMLP:
    def __init__(
        self, source: Source, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False
    ) -> None:
        self._act_and_mul = gated_activation(source, activation)
        self._gate_up = MergedColumnLinear(
            source, "gate_up_proj", hidden_size, [intermediate_size, intermediate_size], bias=bias
        )
        self._down = RowLinear(source, "down_proj", intermediate_size, hidden_size, bias=bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._down(self._act_and_mul(self._gate_up(hidden)))


class MLP:
    def __init__(
        self,
        source: Source,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        up: str = "up_proj",
        down: str = "down_proj",
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        """`up`, `down`: what the checkpoint calls the two. `transposed`: it keeps them [in, out]."""
        self._act = plain_activation(source, activation)
        self._up = ColumnLinear(source, up, hidden_size, intermediate_size, bias=bias, transposed=transposed)
        self._down = RowLinear(source, down, intermediate_size, hidden_size, bias=bias, transposed=transposed)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._down(self._act(self._up(hidden)))


def gated_activation(source: Source, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """[..., 2n] -> [..., n]. `name` as config.json spells it; raises StartupError for one that is not known."""
    return _op(source, name, GATED_ACTIVATIONS)


def clamped_swiglu(source: Source, alpha: float, limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """[..., 2n] -> [..., n], gates and what they gate in turn (gpt-oss)."""
    op = source.ops.clamped_swiglu
    return lambda gate_up: op(gate_up, alpha, limit)


def plain_activation(source: Source, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same without a gate, [..., n] -> [..., n]."""
    return _op(source, name, ACTIVATIONS)


def _op(source: Source, name: str, known: dict[str, str]) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in known:
        raise StartupError(f"hidden_act {name!r} is not supported; {', '.join(known)} are")
    return getattr(source.ops, known[name])
