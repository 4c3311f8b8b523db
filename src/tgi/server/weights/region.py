"""Which part of a tensor is meant, and the checks every reader shares. Knows no file format."""

from __future__ import annotations

from pathlib import Path

from tgi.errors import StartupError

Region = tuple[slice, ...]  # one slice (step 1) for each leading dimension; the others are whole


def bounds_of(shape: tuple[int, ...], region: Region) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every dimension."""
    bounds = [(0, size) for size in shape]
    for dim, part in enumerate(region):
        start, stop, step = part.indices(shape[dim])
        assert step == 1, f"region {region} of shape {shape}"
        assert start <= stop, f"region {region} of shape {shape}"
        bounds[dim] = (start, stop)
    return tuple(bounds)


def check_shape(where: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise StartupError(
            f"{where}: tensor {name} has shape {list(found)}, the model's configuration asks for {list(expected)}; "
            "weights and configuration do not belong together"
        )


def missing(where: Path, name: str) -> StartupError:
    return StartupError(f"{where} holds no tensor {name}; the model's configuration asks for it")
