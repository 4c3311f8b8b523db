"""Which files a model is made of, by their names: formats of weights, parts, indexes; and what must be done to them.

Knows no hub and no cache, and reads nothing but the index that says which files belong together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from tgi.errors import StartupError
from tgi.gguf_file import PART as GGUF_PART

# A tokenizer.json can be made from these.
TOKENIZER_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
ADAPTER = "adapter_config.json"
# Files in the formats of weights that hold none, an adapter's, or the same a second time under other names.
BESIDE = ("adapter_model", "consolidated", "medusa_lm_head", "optimizer", "scheduler", "random_states", "rng_state")
_TRAINING = ("training", "args", "arguments")
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")
_QUANT = re.compile(r"(?:UD-)?(?:I?Q\d|TQ\d|B?F16|F32|MXFP4|NVFP4)\w*$", re.IGNORECASE)
_BESIDE_GGUF = ("mmproj", "imatrix")


class Need(StrEnum):
    """What must be done with a model's files before it can be served; the values end "it must be …"."""

    MERGE = "merged into its base model"
    CONVERT = "converted to safetensors"
    TOKENIZER = "given a tokenizer.json"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one format spells the files of a model's weights."""

    suffix: str
    single: str
    index: str

    def files(self, names: Collection[str], index: Path | None) -> set[str]:
        """The files that hold the weights, by `names` (of the top folder) or by an index; some may not be there."""
        if index is not None and index.is_file():
            return indexed_files(index)
        if self.single in names:
            return {self.single}
        found = {name for name in names if name.endswith(self.suffix) and _may_be_weights(name)}
        return {part for name in found for part in _parts(name)}


SAFETENSORS = WeightFormat(".safetensors", "model.safetensors", "model.safetensors.index.json")
PICKLES = (
    WeightFormat(".bin", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    WeightFormat(".pt", "pytorch_model.pt", "pytorch_model.pt.index.json"),
)


def needs(path: Path) -> list[Need]:
    """What must be done to a directory's files, in this order. A GGUF file needs nothing."""
    if path.is_file():
        return []
    names = {file.name for file in path.iterdir()}
    found: list[Need] = []
    if not SAFETENSORS.files(names, path / SAFETENSORS.index):
        if ADAPTER in names:
            found.append(Need.MERGE)
        elif pickled_files(path):
            found.append(Need.CONVERT)
    if "tokenizer.json" not in names and names.intersection(TOKENIZER_SOURCES):
        found.append(Need.TOKENIZER)
    return found


def pickled_files(folder: Path) -> list[Path]:
    """The .bin or .pt files that hold the weights of a model without safetensors."""
    names = {file.name for file in folder.iterdir()}
    for pickles in PICKLES:
        if files := pickles.files(names, folder / pickles.index):
            return [folder / name for name in sorted(files)]
    return []


def indexed_files(index: Path) -> set[str]:
    """The files that an index names."""
    return set(read_index(index).values())


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file beside the index. Raises StartupError when it is none, or leads out of its folder."""
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise StartupError(f"{index} is not an index of weights ({error}); fetch it again") from error
    for name in weight_map.values():
        if not isinstance(name, str) or name in (".", "..") or name != PurePosixPath(name).name or "\\" in name:
            raise StartupError(f"{index} names {name!r}, which is no file beside it; do not use this model")
    return weight_map


def is_complete(snapshot: Path) -> bool:
    """An adapter, or config.json with every weight file that the index (else the numbering) asks for."""
    names = {file.name for file in snapshot.iterdir()}
    if ADAPTER in names and any(name.startswith("adapter_model.") for name in names):
        return True
    if "config.json" not in names:
        return False
    try:
        files = SAFETENSORS.files(names, snapshot / SAFETENSORS.index) or {
            file.name for file in pickled_files(snapshot)
        }
    except StartupError:
        return False
    return bool(files) and all((snapshot / name).is_file() for name in files)


def _may_be_weights(name: str) -> bool:
    return "/" not in name and not name.startswith(BESIDE) and not any(word in name for word in _TRAINING)


def _parts(name: str) -> set[str]:
    """ "x-00002-of-00003.safetensors" -> all three; any other name alone."""
    numbered = _PART.fullmatch(name)
    if numbered is None:
        return {name}
    stem, count, suffix = numbered.groups()
    return {f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)}


def gguf_names(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]


def choose_gguf(names: Iterable[str], quant: str | None) -> str | None:
    """The one GGUF file among `names`, or the one of that quantisation; of a split model its first part."""
    stems = _gguf_stems(names)
    if quant is None:
        return next(iter(stems.values())) if len(stems) == 1 else stems.get("model")
    ending = re.compile(rf"(?:^|[-._/]){re.escape(quant)}$", re.IGNORECASE)
    fitting = sorted((stem for stem in stems if ending.search(stem)), key=lambda stem: (len(stem), stem))
    return stems[fitting[0]] if fitting else None


def gguf_kinds(names: Iterable[str]) -> list[str]:
    """The quantisations among GGUF files, as `choose_gguf` takes them; [] without a GGUF file."""
    stems = _gguf_stems(names)
    return sorted({found[0] for stem in stems if (found := _QUANT.search(stem))} or stems)


def _gguf_stems(names: Iterable[str]) -> dict[str, str]:
    """Name without suffix and number of part -> file, the first part of several."""
    stems: dict[str, str] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not PurePosixPath(name).name.lower().startswith(_BESIDE_GGUF):
            numbered = GGUF_PART.fullmatch(name)
            stems.setdefault(numbered["stem"] if numbered else name[: -len(".gguf")], name)
    return stems
