"""Activations, plain and gated: signatures and torch references."""

from __future__ import annotations

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2n] -> [..., n]: silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2n] -> [..., n]: gelu(first half) * second half, the exact gelu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2n] -> [..., n]: gelu(first half) * second half, the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def relu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2n] -> [..., n]: relu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.relu(gate) * up


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """[..., 2n] -> [..., n], gates at even places and what they gate at odd ones: gate * sigmoid(alpha * gate) *
    (up + 1), gates cut at `limit`, the others at both sides."""
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def silu(inputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(inputs)


def gelu(inputs: torch.Tensor) -> torch.Tensor:
    """The exact gelu."""
    return torch.nn.functional.gelu(inputs)


def gelu_tanh(inputs: torch.Tensor) -> torch.Tensor:
    """The tanh approximation."""
    return torch.nn.functional.gelu(inputs, approximate="tanh")


def quick_gelu(inputs: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x)"""
    return inputs * torch.sigmoid(1.702 * inputs)


def relu(inputs: torch.Tensor) -> torch.Tensor:
    return torch.relu(inputs)


def squared_relu(inputs: torch.Tensor) -> torch.Tensor:
    return torch.relu(inputs).square()
