"""Weights in torch's pickled files -> safetensors beside them. No code of a file ever runs: tensors, or refused."""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tgi.errors import StartupError
from tgi.model_files import SAFETENSORS, pickled_files
from tgi.server.prepare.staging import staged

# What torch raises for a file that is broken, and for what it cannot rebuild.
_UNREADABLE = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(zipfile.BadZipFile, MemoryError, OverflowError),
)
# Names of heads that models tie to their embeddings: where both share memory, the embedding keeps it.
_HEADS = ("lm_head", "embed_out", "output", "cls", "decoder.embed_tokens", "encoder.embed_tokens")
# Of a tensor that holds the same numbers again and again (a mask, positions).
_REPEATED_BYTES = 1 << 26
# Keys under which training programs wrap the weights.
_WRAPPERS = ("state_dict", "model", "module")


def convert_pickles(folder: Path) -> None:
    """Write model*.safetensors (and their index, for several files) from the folder's .bin or .pt files.

    One file is in memory at a time, mapped where its format allows it. Raises StartupError, one line.
    """
    files = pickled_files(folder)
    if lost := [file.name for file in files if not file.is_file()]:
        raise StartupError(f"{folder} lacks {', '.join(lost)}; fetch the model again")
    weight_map: dict[str, str] = {}
    with staged(folder, first=(SAFETENSORS.index,)) as work:
        for file in files:
            name = SAFETENSORS.single if len(files) == 1 else _converted_name(file)
            tensors, dropped = without_shared(read_pickle(file))
            if again := next((key for key in tensors if key in weight_map), None):
                raise StartupError(f"{file} holds the tensor {again} of another file a second time; fetch it again")
            save_file(tensors, work / name, metadata={**dropped, "format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
        if len(files) > 1:
            (work / SAFETENSORS.index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Tensors by name. Raises StartupError for a file that holds anything that would have to be run, or none."""
    try:
        found = _load(file)
    except pickle.UnpicklingError as error:
        raise StartupError(
            f"{file} is refused: it holds more than tensors, and loading that would run code "
            f"({_reason(error)}). Take the model's safetensors"
        ) from error
    except _UNREADABLE as error:
        raise StartupError(f"{file} cannot be read ({_reason(error)}); fetch it again") from error
    while isinstance(found, Mapping) and (inner := next((key for key in _WRAPPERS if _is_wrapped(found, key)), None)):
        found = found[inner]
    tensors = (
        {str(key): value for key, value in found.items() if isinstance(value, torch.Tensor)}
        if isinstance(found, Mapping)
        else {}
    )
    if not tensors:
        raise StartupError(f"{file} holds no named tensors; fetch it again")
    for name, tensor in tensors.items():
        if odd := _oddness(name, tensor):
            raise StartupError(f"{file} is refused: its tensor {name!r} {odd}. Take the model's safetensors")
    return tensors


def without_shared(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Contiguous tensors that share no memory, and dropped name -> kept name.

    Several names of the same tensor keep one: not a head's, then the shortest. Parts of one storage are copied out.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        groups.setdefault(place if tensor.numel() else (name,), []).append(name)
    kept: dict[str, torch.Tensor] = {}
    dropped: dict[str, str] = {}
    for names in groups.values():
        first, *others = sorted(names, key=lambda name: (_is_head(name), len(name), name))
        kept[first] = tensors[first]
        dropped |= dict.fromkeys(others, first)
    storages = [tensor.untyped_storage().data_ptr() for tensor in kept.values()]
    return {
        name: tensor.clone() if storages.count(storage) > 1 else tensor.contiguous()
        for (name, tensor), storage in zip(kept.items(), storages, strict=True)
    }, dropped


def _oddness(name: str, tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be a weight."""
    if tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided:
        return "does not simply hold its numbers"
    size = tensor.numel() * tensor.element_size()
    if size > max(_REPEATED_BYTES, tensor.untyped_storage().nbytes()):
        return f"would take {size} bytes, more than the file has for it"
    return None if name.isprintable() else "has no name that can be written"


def _load(file: Path) -> Any:
    with file.open("rb") as opened:
        is_archive = opened.read(4) == b"PK\x03\x04"  # older files cannot be mapped
    if is_archive:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise OSError("it is compressed, which torch never does")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a pickle's protocol: what matters is whether it can be read
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)


def _is_wrapped(found: Mapping[Any, Any], key: str) -> bool:
    inner = found.get(key)
    return isinstance(inner, Mapping) and any(isinstance(value, torch.Tensor) for value in inner.values())


def _is_head(name: str) -> bool:
    return any(re.search(rf"(?:^|\.){re.escape(head)}\.", name) for head in _HEADS)


def _converted_name(file: Path) -> str:
    """ "pytorch_model-00001-of-00002.bin" -> "model-00001-of-00002.safetensors"."""
    return file.stem.removeprefix("pytorch_") + SAFETENSORS.suffix


def _reason(error: BaseException) -> str:
    """The sentence of torch's message that says what was found; its advice to trust the file is not ours."""
    lines: Iterable[str] = (str(error).strip() or type(error).__name__).splitlines()
    telling = [line.strip() for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return (telling or [next(iter(str(error).strip().splitlines()), type(error).__name__)])[0][:200]
