"""Tensors of one or several safetensors files in a directory. Keeps one file open at a time.

The library checks what a file says of itself: a header that is too long, offsets that overlap or leave gaps.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tgi.errors import StartupError
from tgi.model_files import BESIDE, read_index
from tgi.server.weights.region import Region, check_shape, missing

INDEX = "model.safetensors.index.json"
# Kinds of numbers that are a weight by themselves; others are codes of a quantisation.
PLAIN = frozenset({"F64", "F32", "F16", "BF16"})


class SafetensorsCheckpoint:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of = _weight_map(directory)
        self._open: tuple[Path, Any] | None = None

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        if name not in self._file_of:
            raise missing(self.directory, name)
        part = self._slice(name)
        check_shape(self._file_of[name], name, tuple(part.get_shape()), shape)
        if part.get_dtype() not in PLAIN:
            raise StartupError(
                f"{self._file_of[name]}: tensor {name} is stored as {part.get_dtype()}, as quantised weights are; take "
                "the model's unquantised weights (or a GGUF file)"
            )
        return part[region] if region else self._handle(self._file_of[name]).get_tensor(name)

    def close(self) -> None:
        self._open = None  # the mapping ends with its last reader

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise missing(file, name) from error  # an index that promises what its file does not hold

    def _handle(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file:
            self._open = None  # unmap the last file first: its pages count as ours
            self._open = (file, _open(file))
        return self._open[1]


def _weight_map(directory: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    index = directory / INDEX
    if index.exists():
        found = {name: directory / file for name, file in read_index(index).items()}
        lost = sorted({file.name for file in found.values() if not file.exists()})
        if lost:
            raise StartupError(f"{directory} lacks {', '.join(lost)}, named by {INDEX}; fetch the model again")
        return found
    files = sorted(file for file in directory.glob("*.safetensors") if not file.name.startswith(BESIDE))
    single = directory / "model.safetensors"
    if single in files:
        files = [single]
    if not files:
        if any(directory.glob("*.bin")):
            raise StartupError(
                f"{directory} holds its weights as .bin files only; convert them with: text-generation-server "
                f"download-weights {directory} --trust-remote-code"
            )
        raise StartupError(f"{directory} holds no *.safetensors")
    return _named(files)


def _named(files: list[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        for name in _open(file).keys():  # noqa: SIM118 (safe_open is no mapping)
            if name in found:
                raise StartupError(
                    f"The tensor {name} stands in both {found[name]} and {file.name}; take away the file that does not "
                    "belong to the model"
                )
            found[name] = file
    return found


def _open(file: Path) -> Any:
    if not file.is_file():
        raise StartupError(f"{file} is no file; fetch it again")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file} cannot be read ({error}); fetch it again") from error
