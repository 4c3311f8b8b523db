"""Source: what a layer is made from. A place in the checkpoint, this rank's share, and the kernels to run on.

Layers read through it at construction; models only name places (`source.at("self_attn")`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tgi.errors import StartupError
from tgi.server.distributed.group import Group
from tgi.server.ops.dispatch import Ops, bind
from tgi.server.ops.matmul import LinearKernel
from tgi.server.ops.moe import Activation, ExpertsKernel
from tgi.server.platforms.detect import platform_of
from tgi.server.quantization.scheme import Part, Scheme
from tgi.server.quantization.select import select_scheme
from tgi.server.weights.checkpoint import Checkpoint
from tgi.server.weights.loader import check_shape_of, load_into
from tgi.server.weights.region import Region


@dataclass(frozen=True, slots=True)
class Source:
    checkpoint: Checkpoint
    group: Group
    ops: Ops
    scheme: Scheme
    dtype: torch.dtype
    device: torch.device
    packed: Mapping[str, Sequence[str]]  # fused layer -> the checkpoint's modules that fold into it, in order
    prefix: str = ""
    kept: list[torch.Tensor] = field(default_factory=list)  # every parameter made so far, of all places

    def at(self, name: str) -> Source:
        """The place `name` below this one."""
        return replace(self, prefix=self.name(name))

    def name(self, leaf: str) -> str:
        return f"{self.prefix}.{leaf}" if self.prefix else leaf

    def has(self, leaf: str) -> bool:
        return self.name(leaf) in self.checkpoint.names()

    def lacks(self, leaf: str) -> bool:
        """Certain absence. Random weights have no names: they neither have a tensor nor lack it."""
        names = self.checkpoint.names()
        return bool(names) and self.name(leaf) not in names

    def parts(self, fused: str) -> Sequence[Source]:
        """The places that fold into layer `fused`; one alone when the checkpoint has it fused already."""
        if fused not in self.packed or self.has(f"{fused}.weight"):
            return (self.at(fused),)
        return tuple(self.at(name) for name in self.packed[fused])

    def tensor(
        self, leaf: str, shape: tuple[int, ...], region: Region = (), dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """This rank's `region` of a tensor whose whole shape is `shape`, as a parameter; in the model's dtype unless
        another is given."""
        sizes = list(shape)
        for dim, part in enumerate(region):
            sizes[dim] = part.stop - part.start
        check_shape_of(self.checkpoint, self.name(leaf), shape)
        parameter = torch.empty(sizes, dtype=dtype or self.dtype, device=self.device)
        load_into(parameter, self.checkpoint, self.name(leaf), shape, region)
        self.kept.append(parameter)
        return parameter

    def linear(self, parts: Sequence[Part], float_out: bool = False) -> LinearKernel:
        kernel = self.scheme.load(self.checkpoint, parts, self.dtype, self.device, float_out)
        self.kept.extend(kernel.kept)
        return kernel

    def experts(
        self, up: Sequence[Sequence[Part]], down: Sequence[Sequence[Part]], activation: Activation
    ) -> ExpertsKernel:
        kernel = self.scheme.load_experts(self.checkpoint, up, down, activation, self.dtype, self.device)
        self.kept.extend(kernel.kept)
        return kernel

    def matrix(self, weight: torch.Tensor, float_out: bool = False) -> LinearKernel:
        """A linear map over a parameter that exists already (a head that shares the embedding's)."""
        kernel = self.ops.linear(weight, None, float_out)
        self.kept.extend(kernel.kept)
        return kernel

    def share(self, size: int, what: str) -> slice:
        """This rank's equal part of `size`. `what` is the word for it in the error."""
        ranks, rank = self.group.world_size, self.group.rank
        if size % ranks:
            fitting = ", ".join(str(count) for count in range(1, size + 1) if size % count == 0 and count <= 64)
            raise StartupError(f"{size} {what} cannot be split over {ranks} shards; --num-shard may be {fitting}")
        part = size // ranks
        return slice(rank * part, (rank + 1) * part)

    @property
    def kept_bytes(self) -> int:
        """Memory of all parameters, shared ones counted once."""
        return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in self.kept}.values())


def open_source(
    checkpoint: Checkpoint,
    *,
    quant_method: str | None,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    packed: Mapping[str, Sequence[str]],
) -> Source:
    """The root of a checkpoint. Raises StartupError for a quantisation or a device that is not supported."""
    ops = bind(platform_of(device).kernels)
    return Source(checkpoint, group, ops, select_scheme(quant_method, ops), dtype, device, packed)
