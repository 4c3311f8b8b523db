"""Read a GGUF file: header, metadata, tensor table. Knows no tensor library and no tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Arrays of the metadata are parsed when first asked
for, so that a vocabulary of 50,000 strings costs nothing to those who only want the number of layers. A model split
into parts (`x-00001-of-00003.gguf`) reads as one file: its first part has the metadata, each part some of the tensors.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi.errors import TgiError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_RANK = 4
VERSIONS = (2, 3)
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


class BadGguf(TgiError):
    """The file is not a readable GGUF file."""


def part_paths(path: Path) -> list[Path]:
    """All parts of the split model that `path` is a part of, the first one first; of any other file only itself."""
    named = PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named["stem"], int(named["count"])
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. `shape` is in row-major order (outermost first), unlike the file's."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # bytes from the start of its file


class GgufFile(Mapping[str, Any]):
    """Metadata as a read-only mapping; `tensors` by name; `bytes_of()` a view into the mapped file.

    `whole`: with the tensors of all parts where the model is split. Raises BadGguf, one line.
    """

    def __init__(self, path: Path | str, whole: bool = True) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BadGguf(f"cannot read {self.path}: {error}") from error
        self._parts: dict[str, GgufFile] = {}  # tensor name -> the further part that holds it
        try:
            self._parse()
            if whole and self.get("split.count", 1) > 1:
                self._open_parts()
        except (ArithmeticError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
            raise BadGguf(f"{self.path} is not a valid GGUF file (truncated or corrupt: {error})") from error

    def _open_parts(self) -> None:
        if self["split.no"] != 0:
            raise BadGguf(f"{self.path} is a later part of a split model; give its first part")
        _, *others = part_paths(self.path)
        if len(others) + 1 != self["split.count"]:
            raise BadGguf(
                f"{self.path} is the first of {self['split.count']} parts but is not named so "
                f"(x-00001-of-{self['split.count']:05d}.gguf); give the parts their names back"
            )
        lost = [part.name for part in others if not part.is_file()]
        if lost:
            raise BadGguf(f"{self.path} lacks its further parts {', '.join(lost)}; fetch them into the same folder")
        for path in others:
            part = GgufFile(path, whole=False)
            for name in part.tensors:
                if name in self.tensors:
                    raise BadGguf(f"{path} holds the tensor {name!r} of another part a second time; fetch it again")
                self._parts[name] = part
            self.tensors |= part.tensors

    def _parse(self) -> None:
        if self._map[:4] != MAGIC:
            raise BadGguf(f"{self.path} is not a GGUF file (its first bytes are not 'GGUF')")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._map, 4)
        if int.from_bytes(self._map[4:8], "big") in VERSIONS:
            raise BadGguf(f"{self.path} is a big-endian GGUF file, which is not supported; take a little-endian one")
        if version not in VERSIONS:
            raise BadGguf(f"{self.path}: GGUF version {version} is not supported (2 and 3 are)")
        position = 24
        self._values: dict[str, Any] = {}
        self._lazy: dict[str, int] = {}  # key -> position of its array
        for _ in range(num_keys):
            key, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._map, position)
            position += 4
            if key in self._values or key in self._lazy:
                raise ValueError(f"the key {key!r} twice")
            if kind == ARRAY:
                self._lazy[key] = position
                position = self._skip_array(position)
            else:
                self._values[key], position = self._scalar(kind, position)
        table: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (rank,) = struct.unpack_from("<I", self._map, position)
            if rank > MAX_RANK:
                raise BadGguf(f"{self.path}: tensor {name!r} has {rank} dimensions (at most {MAX_RANK})")
            shape = struct.unpack_from(f"<{rank}Q", self._map, position + 4)
            if 0 in shape:
                raise BadGguf(f"{self.path}: tensor {name!r} has no elements; fetch it again")
            position += 4 + 8 * rank
            ggml_type, offset = struct.unpack_from("<IQ", self._map, position)
            position += 12
            table.append((name, tuple(reversed(shape)), ggml_type, offset))
        if len({name for name, *_ in table}) < len(table):
            raise BadGguf(f"{self.path} names a tensor twice; fetch it again")
        alignment = int(self._values.get("general.alignment", 32))
        if alignment <= 0:
            raise ValueError(f"an alignment of {alignment}")
        base = position + (-position) % alignment
        self.tensors = {
            name: GgufTensor(name, shape, ggml_type, base + offset) for name, shape, ggml_type, offset in table
        }

    def bytes_of(self, tensor: GgufTensor, num_bytes: int) -> memoryview:
        """The tensor's first `num_bytes` bytes, without a copy. Raises BadGguf when the file ends before."""
        if tensor.name in self._parts:
            return self._parts[tensor.name].bytes_of(tensor, num_bytes)
        end = tensor.offset + num_bytes
        if end > len(self._map):
            missing = end - len(self._map)
            raise BadGguf(
                f"{self.path} is truncated: tensor {tensor.name!r} needs {missing} bytes more; fetch it again"
            )
        return memoryview(self._map)[tensor.offset : end]

    def drop_pages(self) -> None:
        """What was read so far is not needed soon: its pages no longer count as this process's memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in (self, *{id(part): part for part in self._parts.values()}.values()):
                file._map.madvise(mmap.MADV_DONTNEED)

    def part_of(self, tensor: GgufTensor) -> Path:
        """The file that holds the tensor's bytes, at its offset."""
        return self._parts.get(tensor.name, self).path

    def __getitem__(self, key: str) -> Any:
        if key in self._lazy:
            self._values[key] = self._array(self._lazy.pop(key))
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._values, *self._lazy))

    def __len__(self) -> int:
        return len(self._values) + len(self._lazy)

    def _string(self, position: int) -> tuple[str, int]:
        raw, position = self._bytes(position)
        return raw.decode("utf-8"), position

    def _bytes(self, position: int) -> tuple[bytes, int]:
        (length,) = struct.unpack_from("<Q", self._map, position)
        end = position + 8 + length
        if end > len(self._map):
            raise IndexError("a string ends behind the end of the file")
        return self._map[position + 8 : end], end

    def _scalar(self, kind: int, position: int) -> tuple[Any, int]:
        if kind == STRING:
            return self._string(position)
        code = _code(kind)
        (value,) = struct.unpack_from(code, self._map, position)
        return value, position + struct.calcsize(code)

    def _array(self, position: int) -> list[Any]:
        kind, length = struct.unpack_from("<IQ", self._map, position)
        position += 12
        if kind == STRING:
            values: list[Any] = []
            for _ in range(length):
                raw, position = self._bytes(position)
                # Vocabularies hold byte-level pieces; a broken one must not stop those who read other keys.
                values.append(raw.decode("utf-8", errors="replace"))
            return values
        return list(struct.unpack_from(f"<{length}{_code(kind)[1:]}", self._map, position))

    def _skip_array(self, position: int) -> int:
        kind, length = struct.unpack_from("<IQ", self._map, position)
        position += 12
        if kind != STRING:
            position += length * struct.calcsize(_code(kind))
        else:
            for _ in range(length):
                (size,) = struct.unpack_from("<Q", self._map, position)
                position += 8 + size
        if position > len(self._map):
            raise IndexError("an array ends behind the end of the file")
        return position


def _code(kind: int) -> str:
    """struct's code of a scalar. Raises ValueError for arrays in arrays, and for what is not known."""
    if kind not in SCALARS:
        raise ValueError("an array of arrays" if kind == ARRAY else f"metadata of type {kind}")
    return "<" + SCALARS[kind]
