"""Collectives over torch.distributed, for a world of more than one rank. Knows neither layers nor plans."""

from __future__ import annotations

from datetime import timedelta

import torch

from tgi.errors import StartupError


class ProcessCollectives:
    """A Group over one default process group. Made once per process."""

    def __init__(
        self, rank: int, world_size: int, master_addr: str, master_port: int, device: torch.device, timeout_s: float
    ) -> None:
        # Only here, so that a rank that serves alone does not pay for it.
        import torch.distributed as dist

        self.rank = rank
        self.world_size = world_size
        self._dist = dist
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"tcp://{master_addr}:{master_port}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise StartupError(
                f"rank {rank} of {world_size} could not join the others at {master_addr}:{master_port} within "
                f"{timeout_s:g} s ({reason}); check that every rank runs and that the address can be reached"
            ) from error

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self._dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        dim %= tensor.dim()
        parts = tensor.new_empty((self.world_size, *tensor.shape))
        self._dist.all_gather_into_tensor(parts.view(-1), tensor.contiguous().view(-1))
        # [ranks, ..., n, ...] -> [..., ranks * n, ...]
        joined = parts.movedim(0, dim)
        return joined.reshape(*tensor.shape[:dim], self.world_size * tensor.shape[dim], *tensor.shape[dim + 1 :])

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        self._dist.broadcast(tensor, src)
        return tensor

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()
