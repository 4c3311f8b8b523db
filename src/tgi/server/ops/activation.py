"""Gated activations: signatures and torch references."""

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
