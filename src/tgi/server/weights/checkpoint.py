"""Checkpoint: named tensors, read in slices so that a rank touches only its part. Knows no model and no layer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch

from tgi.errors import StartupError
from tgi.server.weights.gguf_checkpoint import GgufCheckpoint
from tgi.server.weights.region import Region
from tgi.server.weights.safetensors_checkpoint import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """Names are those of the architecture's safetensors files, whatever the format spells."""

    def names(self) -> Collection[str]:
        """Every tensor there is; empty when any tensor can be had (random weights)."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises KeyError when there is none of that name."""
        ...

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        """The part of a tensor within `region`, in the file's dtype or, from quantised blocks, in float32.

        `shape` is what the caller expects of the whole tensor. The result may be a view into the file: copy it at once.
        Threads may read parts of one tensor at once, when one of them has been read before.
        Raises StartupError when the tensor is missing, of another shape, or unreadable.
        """
        ...

    def close(self) -> None:
        """Let the files go. What was read stays valid."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a .gguf file or a directory with *.safetensors. Reads only headers. Raises StartupError."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix.lower() == ".gguf":
        return GgufCheckpoint(path)
    if path.exists():
        raise StartupError(f"{path} is neither a directory with *.safetensors nor a .gguf file")
    raise StartupError(f"{path} does not exist")
