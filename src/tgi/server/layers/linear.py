"""Linear layers split over the ranks, each one product however many checkpoint modules fold into it.

        column: the rank owns output features, no exchange     row: it owns input features, sums over the ranks follow

Knows sharding, not the form a weight is kept in (that is the scheme's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tgi.errors import StartupError
from tgi.server.layers.source import Source
from tgi.server.quantization.scheme import Part


class MergedColumnLinear:
    """Several modules that read the same input, as one. Output: this rank's rows of the first, of the second, ..."""

    def __init__(
        self,
        source: Source,
        name: str,
        in_features: int,
        sizes: Sequence[int],
        *,
        bias: bool = False,
        rows: Sequence[slice] | None = None,
        transposed: bool = False,
    ) -> None:
        """`sizes`: output features of each module, all ranks together. `rows`: this rank's of each; equal shares if
        not given. `transposed`: the checkpoint keeps weights [in, out]."""
        rows = rows or [source.share(size, f"output features of {source.name(name)}") for size in sizes]
        parts = _column_parts(source, name, in_features, sizes, rows, bias)
        self._kernel = source.linear([replace(part, transposed=transposed) for part in parts])

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._kernel(inputs)


class ColumnLinear(MergedColumnLinear):
    """One module."""

    def __init__(
        self,
        source: Source,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__(source, name, in_features, [out_features], bias=bias, transposed=transposed)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of this rank. With fewer key-value heads than ranks each of them lives on several ranks."""

    query: slice
    key_value: slice
    copies: int  # ranks that hold the same key-value heads

    @property
    def num_heads(self) -> int:
        return self.query.stop - self.query.start

    @property
    def num_kv_heads(self) -> int:
        return self.key_value.stop - self.key_value.start


def share_heads(source: Source, heads: int, kv_heads: int) -> HeadShare:
    """Raises StartupError where the ranks cannot share the heads evenly."""
    ranks = source.group.world_size
    query = source.share(heads, "attention heads")
    if kv_heads >= ranks:
        return HeadShare(query, source.share(kv_heads, "key-value heads"), 1)
    if ranks % kv_heads:
        raise StartupError(
            f"{kv_heads} key-value heads cannot be spread evenly over {ranks} shards; choose a --num-shard "
            f"that divides {kv_heads} or is a multiple of it"
        )
    first = source.group.rank * kv_heads // ranks
    return HeadShare(query, slice(first, first + 1), ranks // kv_heads)


class QKVLinear:
    """Query, key and value projections as one. Output: this rank's query heads, key heads, value heads.

    Checkpoints have them as three modules (which PACKED names), or as one whose rows lie

        merged:  q0 q1 q2 q3 | k0 k1 | v0 v1           (Phi-3, GPT-2, MPT)
        grouped: q0 q1 k0 v0 | q2 q3 k1 v1             (GPT-NeoX, BLOOM, Falcon: each key head behind its queries)
    """

    def __init__(
        self,
        source: Source,
        name: str,
        in_features: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        transposed: bool = False,
        grouped: bool = False,
    ) -> None:
        """`transposed`: the checkpoint keeps weights [in, out]."""
        self.share = share_heads(source, heads, kv_heads)
        query, key = self.share.query, self.share.key_value
        if grouped:
            place = source.at(name)
            rows = _grouped_rows(query, key, heads // kv_heads, head_dim)
            shape = ((heads + 2 * kv_heads) * head_dim, in_features)
            has_bias = bias or place.has("bias")
            parts = [Part(place.prefix, shape, own, slice(0, in_features), has_bias) for own in rows]
        else:
            sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
            rows = [slice(part.start * head_dim, part.stop * head_dim) for part in (query, key, key)]
            parts = _column_parts(source, name, in_features, sizes, rows, bias)
        self._kernel = source.linear([replace(part, transposed=transposed) for part in parts])

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._kernel(inputs)


class RowLinear:
    """One module whose input is spread over the ranks; the output is whole on each."""

    def __init__(
        self,
        source: Source,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        place = source.at(name)
        part = Part(
            module=place.prefix,
            shape=(out_features, in_features),
            rows=slice(0, out_features),
            columns=source.share(in_features, f"input features of {place.prefix}"),
            # Once in the sum, not once per rank.
            bias=source.group.rank == 0 and (bias or place.has("bias")),
            transposed=transposed,
        )
        self._kernel = source.linear([part])
        self._group = source.group

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce_(self._kernel(inputs))


def _grouped_rows(query: slice, key: slice, group: int, head_dim: int) -> list[slice]:
    """Where a grouped tensor has the rows of these heads: queries, keys, values."""

    def head(at: int) -> slice:
        return slice(at * head_dim, (at + 1) * head_dim)

    queries = [head(index // group * (group + 2) + index % group) for index in range(query.start, query.stop)]
    keys = [head(index * (group + 2) + group) for index in range(key.start, key.stop)]
    values = [head(index * (group + 2) + group + 1) for index in range(key.start, key.stop)]
    return queries + keys + values


def _column_parts(
    source: Source, name: str, in_features: int, sizes: Sequence[int], rows: Sequence[slice], bias: bool
) -> list[Part]:
    places = source.parts(name)
    whole = slice(0, in_features)
    # The last place has what is left, fused already: the same rows, counted from where each module begins.
    alone = len(places) - 1
    parts: list[Part] = []
    for index, (size, own) in enumerate(zip(sizes, rows, strict=True)):
        place, start, height = places[min(index, alone)], 0, size
        if index >= alone:
            start, height = sum(sizes[alone:index]), sum(sizes[alone:])
        own_rows = slice(start + own.start, start + own.stop)
        parts.append(Part(place.prefix, (height, in_features), own_rows, whole, bias or place.has("bias")))
    return parts
