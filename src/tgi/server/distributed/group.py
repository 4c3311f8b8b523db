"""The ranks that serve one model together: who this process is, and how the ranks find each other.

Knows no layer. A world of one costs nothing: its collectives return their input and torch.distributed stays unloaded.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tgi.errors import StartupError
from tgi.server.distributed.collectives import ProcessCollectives

TIMEOUT_S = 120  # to find each other, and for a collective whose peer has died


class Group(Protocol):
    """Collectives are called by every rank in the same order. None waits for the host on CUDA."""

    rank: int
    world_size: int

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors, of equal shape, joined along `dim` in order of rank."""
        ...

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """`tensor` of rank `src` on every rank, in place; returns `tensor`."""
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


class SingleRank:
    """The group of a process that serves alone."""

    rank = 0
    world_size = 1

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        pass


def make_group(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    device: torch.device | str,
    timeout_s: float = TIMEOUT_S,
) -> Group:
    """Joins the ranks: NCCL on CUDA, gloo elsewhere; returns when all have arrived.

    Raises StartupError when a rank number is impossible or a peer does not come within `timeout_s`.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise StartupError(f"rank {rank} does not exist in a world of {world_size}: ranks go from 0 to world size - 1")
    if world_size == 1:
        return SingleRank()
    return ProcessCollectives(rank, world_size, master_addr, master_port, torch.device(device), timeout_s)
