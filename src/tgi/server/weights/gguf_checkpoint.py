"""Tensors of a GGUF file under the names, in the row order and with the offsets of the model's safetensors files.

Knows how tensors are cut and ordered, not their names (`gguf_layouts.py`), their blocks (`gguf_blocks.py`) nor what a
model does with a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tgi.errors import StartupError
from tgi.gguf_file import BadGguf, GgufFile, GgufTensor
from tgi.server.weights.gguf_blocks import BlockType, block_type, dequantize
from tgi.server.weights.gguf_layouts import layout_of, part_of
from tgi.server.weights.region import Region, bounds_of, check_shape, missing

# Read with the configuration, not with the weights.
SETTINGS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})
Bounds = Sequence[tuple[int, int]]  # (start, stop) of each dimension
LARGEST_STACK = 1 << 14  # tensors
DROP_PAGES_AFTER = 64 << 20  # bytes read


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the checkpoint: one of the file, or one of a stack in it."""

    tensor: GgufTensor
    part: str  # "attn_q"
    partner: GgufTensor | None = None  # whose rows take turns with the tensor's, or follow them
    joined: bool = False  # follow, in each of a stack of matrices
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape
        if self.joined:
            assert self.partner is not None
            return (shape[0] * (shape[2] + self.partner.shape[1]), shape[1])
        if self.partner is not None:
            shape = (shape[0], 2 * shape[1], *shape[2:])
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


class GgufCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = GgufFile(path)
        except BadGguf as error:
            raise StartupError(str(error)) from error
        self._architecture = str(self._file.get("general.architecture"))
        self._layout = layout_of(self._architecture, self._file.tensors.keys())
        self._entries = self._make_entries()
        self._unread = DROP_PAGES_AFTER
        self._check_overlaps()

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        if name not in self._entries:
            raise missing(self.path, name)
        entry = self._entries[name]
        check_shape(self.path, name, entry.shape, shape)
        bounds = bounds_of(shape, region)
        if any(start == stop for start, stop in bounds):
            return torch.empty([stop - start for start, stop in bounds])
        if entry.transposed:
            bounds = (*bounds[:-2], bounds[-1], bounds[-2])
        if entry.partner is None:
            values = self._read(entry, entry.tensor, bounds)
        elif entry.joined:
            values = self._read_joined(entry, entry.partner, bounds)
        else:
            values = self._read_in_turn(entry, entry.partner, bounds)
        return values.transpose(-1, -2) if entry.transposed else values

    def _make_entries(self) -> dict[str, Entry]:
        layout, in_turn, joined = self._layout, self._layout.in_turn or {}, self._layout.joined or {}
        entries: dict[str, Entry] = {}
        for name, tensor in self._file.tensors.items():
            part = part_of(name)
            if name in SETTINGS or part in in_turn.values() or part in joined.values():
                continue
            partner = None
            if other := in_turn.get(part) or joined.get(part):
                partner = self._partner(tensor, name.replace(part, other), part in joined)
            is_matrix = name.endswith(".weight") and len(tensor.shape) > 1
            entry = Entry(tensor, part, partner, part in joined, is_matrix and part in layout.transposed)
            if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
                entry = replace(entry, tensor=replace(tensor, shape=(1, *tensor.shape)))  # converters drop the one row
            own = layout.name(name)
            if own == name or "{}" not in own:
                entries[own] = entry
                continue
            for number, one in enumerate(self._unstacked(tensor)):
                entries[own.format(number)] = replace(entry, tensor=one)
        return entries

    def _partner(self, tensor: GgufTensor, name: str, joined: bool) -> GgufTensor:
        """Raises StartupError unless it is of the same shape or, to be joined, [n, further rows, columns] to the
        tensor's [n, columns, rows]."""
        partner = self._file.tensors.get(name)
        shape = None if partner is None else partner.shape
        wanted = (tensor.shape[0], shape[1], tensor.shape[1]) if joined and shape and len(shape) == 3 else tensor.shape
        if partner is None or shape != wanted or len(tensor.shape) < (3 if joined else 2):
            raise StartupError(f"{self.path} has no {name} of a shape that fits {tensor.name}; fetch the file again")
        return partner

    def _unstacked(self, tensor: GgufTensor) -> Iterator[GgufTensor]:
        if len(tensor.shape) < 2 or not 0 < tensor.shape[0] <= LARGEST_STACK:
            raise StartupError(f"{self.path}: {tensor.name} of shape {list(tensor.shape)} is no stack of tensors")
        blocks = self._blocks(tensor)
        shape = tensor.shape[1:]
        step = math.prod(shape) // blocks.elements * blocks.bytes
        for number in range(tensor.shape[0]):
            yield replace(tensor, shape=shape, offset=tensor.offset + number * step)

    def _read_in_turn(self, entry: Entry, partner: GgufTensor, bounds: Bounds) -> torch.Tensor:
        """Row 2i is the tensor's i-th, row 2i + 1 the partner's; rows are the second dimension."""
        stack, (first, last), *others = bounds
        halved = (stack, (first // 2, -(-last // 2)), *others)
        both = [self._read(entry, tensor, halved) for tensor in (entry.tensor, partner)]
        return torch.stack(both, dim=2).flatten(1, 2)[:, first % 2 : first % 2 + last - first]

    def _read_joined(self, entry: Entry, partner: GgufTensor, bounds: Bounds) -> torch.Tensor:
        """Of each head the tensor's columns as rows, then the partner's rows."""
        (first, last), columns = bounds
        own, more = entry.tensor.shape[2], partner.shape[1]
        heads = (first // (own + more), -(-last // (own + more)))
        before = self._read(entry, entry.tensor, (heads, columns, (0, own))).transpose(1, 2)
        behind = self._read(entry, partner, (heads, (0, more), columns))
        start = first - heads[0] * (own + more)
        return torch.cat((before, behind), dim=1).flatten(0, 1)[start : start + last - first]

    def _read(self, entry: Entry, tensor: GgufTensor, bounds: Bounds) -> torch.Tensor:
        blocks = self._blocks(tensor)
        sizes = [stop - start for start, stop in bounds]
        # A vector is a matrix of one column, so that its elements can be reordered as rows are.
        *outer, (first, last) = bounds if len(bounds) > 1 else (*bounds, (0, 1))
        # Whole blocks that cover the columns asked for: [..., bytes].
        from_block, to_block = first // blocks.elements, -(-last // blocks.elements)
        rows = self._rows(entry, tensor, blocks, outer)
        raw = torch.from_numpy(rows[..., from_block * blocks.bytes : to_block * blocks.bytes].copy())
        self._count(raw.numel())
        values = dequantize(blocks, raw.view(-1, blocks.bytes)).view(*raw.shape[:-1], -1)
        start = first - from_block * blocks.elements
        values = values[..., start : start + last - first].reshape(sizes)
        return values - 1 if self._layout.shifted_norms and entry.part.endswith("_norm") else values

    def close(self) -> None:
        self._entries = {}
        self._file.drop_pages()

    def _blocks(self, tensor: GgufTensor) -> BlockType:
        blocks = block_type(tensor.ggml_type)
        if blocks is None:
            raise StartupError(
                f"{self.path}: tensor {tensor.name} has block type {tensor.ggml_type}, which is not supported; take a "
                "file of another quantisation, such as Q4_K_M or Q8_0"
            )
        columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        if columns % blocks.elements:
            raise StartupError(
                f"{self.path}: rows of {tensor.name} ({columns} elements) do not hold whole {blocks.name} blocks of "
                f"{blocks.elements}; fetch the file again"
            )
        return blocks

    def _check_overlaps(self) -> None:
        """Two names for the same bytes are not what any converter writes."""
        by_place = sorted(self._file.tensors.values(), key=lambda tensor: (self._file.part_of(tensor), tensor.offset))
        for tensor, following in pairwise(by_place):
            blocks, part = block_type(tensor.ggml_type), self._file.part_of(tensor)
            if blocks is None or part != self._file.part_of(following):
                continue
            if tensor.offset + math.prod(tensor.shape) // blocks.elements * blocks.bytes > following.offset:
                raise StartupError(f"{part}: tensors {tensor.name} and {following.name} overlap; fetch the file again")

    def _rows(
        self, entry: Entry, tensor: GgufTensor, blocks: BlockType, outer: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """The bytes of the rows asked for, in checkpoint order: [..., bytes of a row]."""
        lead, columns = (tensor.shape[:-1], tensor.shape[-1]) if len(tensor.shape) > 1 else (tensor.shape, 1)
        row_bytes = columns // blocks.elements * blocks.bytes
        try:
            data = self._file.bytes_of(tensor, math.prod(lead) * row_bytes)
        except BadGguf as error:
            raise StartupError(str(error)) from error
        rows = np.frombuffer(data, dtype=np.uint8).reshape(*lead, row_bytes)
        order = self._order(entry, rows.shape[0])
        return rows[tuple(slice(*bound) for bound in outer)] if order is None else rows[order[slice(*outer[0])]]

    def _order(self, entry: Entry, num_rows: int) -> np.ndarray | None:
        """File row of each checkpoint row; None where they are the same."""
        heads: Any = self._file.get(f"{self._architecture}.attention.head_count")
        kv_heads: Any = self._file.get(f"{self._architecture}.attention.head_count_kv", heads)
        try:
            if self._layout.permuted and entry.part in ("attn_q", "attn_k"):
                return row_order(num_rows, heads if entry.part == "attn_q" else kv_heads)
            if self._layout.grouped and entry.part == "attn_qkv":
                return grouped_order(num_rows, heads, kv_heads)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise StartupError(
                f"{self.path}: {num_rows} rows of {entry.tensor.name} are not shared evenly by {heads!r} heads and "
                f"{kv_heads!r} of keys and values; fetch the file again"
            ) from error
        return None

    def _count(self, num_bytes: int) -> None:
        self._unread -= num_bytes
        if self._unread < 0:
            self._file.drop_pages()
            self._unread = DROP_PAGES_AFTER


def row_order(num_rows: int, heads: int) -> np.ndarray:
    """File row of each checkpoint row.

    Within a head of d rows the checkpoint has the first halves of all rotated pairs, then the second halves; the file
    has the two of each pair side by side:

        checkpoint   0   1   2  ...  d/2  d/2+1 ...
        file         0   2   4  ...   1     3   ...
    """
    pairs = np.arange(num_rows).reshape(heads, -1, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def grouped_order(num_rows: int, heads: int, kv_heads: int) -> np.ndarray:
    """File row of each checkpoint row, for queries, keys and values in one tensor. Here of four heads in two groups:

    checkpoint   q0 q1 k0 v0 q2 q3 k1 v1
    file         q0 q1 q2 q3 k0 k1 v0 v1
    """
    rows = np.arange(num_rows).reshape(heads + 2 * kv_heads, -1)
    queries, keys, values = np.split(rows, (heads, heads + kv_heads))
    groups = queries.reshape(kv_heads, heads // kv_heads, -1), keys[:, None], values[:, None]
    return np.concatenate(groups, axis=1).reshape(-1)
