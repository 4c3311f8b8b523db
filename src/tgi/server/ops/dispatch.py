"""Op name -> function, bound once per platform. What a platform's table does not list runs on the torch reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch

from tgi.server.ops import activation, matmul, moe, norm, rotary


@dataclass(frozen=True, slots=True)
class Ops:
    """The kernels of one platform. Signatures are the references'."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor] = norm.rms_norm
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float], torch.Tensor] = norm.add_rms_norm
    layer_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float, torch.dtype], torch.Tensor] = (
        norm.layer_norm
    )
    rotate_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor] = rotary.rotate_
    silu: Callable[[torch.Tensor], torch.Tensor] = activation.silu
    gelu: Callable[[torch.Tensor], torch.Tensor] = activation.gelu
    gelu_tanh: Callable[[torch.Tensor], torch.Tensor] = activation.gelu_tanh
    quick_gelu: Callable[[torch.Tensor], torch.Tensor] = activation.quick_gelu
    relu: Callable[[torch.Tensor], torch.Tensor] = activation.relu
    squared_relu: Callable[[torch.Tensor], torch.Tensor] = activation.squared_relu
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor] = activation.silu_and_mul
    gelu_and_mul: Callable[[torch.Tensor], torch.Tensor] = activation.gelu_and_mul
    gelu_tanh_and_mul: Callable[[torch.Tensor], torch.Tensor] = activation.gelu_tanh_and_mul
    relu_and_mul: Callable[[torch.Tensor], torch.Tensor] = activation.relu_and_mul
    clamped_swiglu: Callable[[torch.Tensor, float, float], torch.Tensor] = activation.clamped_swiglu
    experts: Callable[..., moe.ExpertsKernel] = moe.experts
    linear: Callable[[torch.Tensor, torch.Tensor | None, bool], matmul.LinearKernel] = matmul.linear


def bind(kernels: Mapping[str, str]) -> Ops:
    """`kernels`: op -> "module:function". An op that no reference names is a mistake in the table."""
    unknown = kernels.keys() - {field.name for field in fields(Ops)}
    assert not unknown, f"no such op: {', '.join(sorted(unknown))}"
    return Ops(**{op: _load(target) for op, target in kernels.items()})


def _load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)
