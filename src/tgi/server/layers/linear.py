"""Linear layers split over the ranks, each one product however many checkpoint modules fold into it.

        column: the rank owns output features, no exchange     row: it owns input features, sums over the ranks follow

Knows sharding, not the form a weight is kept in (that is the scheme's).
"""

from __future__ import annotations

from collections.abc import Sequence

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
    ) -> None:
        """`sizes`: output features of each module, all ranks together. `rows`: this rank's of each; equal shares if
        not given."""
        rows = rows or [source.share(size, f"output features of {source.name(name)}") for size in sizes]
        self._kernel = source.linear(_column_parts(source, name, in_features, sizes, rows, bias))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._kernel(inputs)


class ColumnLinear(MergedColumnLinear):
    """One module."""

    def __init__(self, source: Source, name: str, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(source, name, in_features, [out_features], bias=bias)


class QKVLinear(MergedColumnLinear):
    """Query, key and value projections as one. Output: this rank's query heads, key heads, value heads.

    With fewer key-value heads than ranks each of them lives on several ranks.
    """

    def __init__(
        self, source: Source, name: str, in_features: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool
    ) -> None:
        ranks = source.group.world_size
        query = source.share(heads, "attention heads")
        if kv_heads < ranks:
            if ranks % kv_heads:
                raise StartupError(
                    f"{kv_heads} key-value heads cannot be spread evenly over {ranks} shards; choose a --num-shard "
                    f"that divides {kv_heads} or is a multiple of it"
                )
            first = source.group.rank * kv_heads // ranks
            key = slice(first, first + 1)
        else:
            key = source.share(kv_heads, "key-value heads")
        self.num_heads = query.stop - query.start
        self.num_kv_heads = key.stop - key.start
        super().__init__(
            source,
            name,
            in_features,
            [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim],
            bias=bias,
            rows=[slice(part.start * head_dim, part.stop * head_dim) for part in (query, key, key)],
        )


class RowLinear:
    """One module whose input is spread over the ranks; the output is whole on each."""

    def __init__(self, source: Source, name: str, in_features: int, out_features: int, *, bias: bool = False) -> None:
        place = source.at(name)
        part = Part(
            module=place.prefix,
            shape=(out_features, in_features),
            rows=slice(0, out_features),
            columns=source.share(in_features, f"input features of {place.prefix}"),
            # Once in the sum, not once per rank.
            bias=source.group.rank == 0 and (bias or place.has("bias")),
        )
        self._kernel = source.linear([part])
        self._group = source.group

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce_(self._kernel(inputs))


def _column_parts(
    source: Source, name: str, in_features: int, sizes: Sequence[int], rows: Sequence[slice], bias: bool
) -> list[Part]:
    places = source.parts(name)
    whole = slice(0, in_features)
    if len(places) == len(sizes):
        return [
            Part(place.prefix, (size, in_features), own, whole, bias or place.has("bias"))
            for place, size, own in zip(places, sizes, rows, strict=True)
        ]
    # The checkpoint has them fused already: the same rows, counted from where each module begins.
    (place,) = places
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    shape = (sum(sizes), in_features)
    has_bias = bias or place.has("bias")
    return [
        Part(place.prefix, shape, slice(start + own.start, start + own.stop), whole, has_bias)
        for start, own in zip(starts, rows, strict=True)
    ]
