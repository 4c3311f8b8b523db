"""Textbook attention in float64, and random steps over a paged cache to compare a backend with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi.server.attention.backend import AttentionInputs


def dense_attention(query, keys, values, scale, window, softcap, sinks, alibi):
    """[q, heads, d] against all keys of one row, [context, kv_heads, d]: the textbook in float64."""
    q, heads, _ = query.shape
    context, kv_heads, _ = keys.shape
    out = torch.zeros(q, heads, values.shape[2], dtype=torch.float64)
    for head in range(heads):
        k, v = keys[:, head // (heads // kv_heads)].double(), values[:, head // (heads // kv_heads)].double()
        for j in range(q):
            last = context - q + j
            first = 0 if window is None else max(0, last - window + 1)
            scores = scale * (k[first : last + 1] @ query[j, head].double())
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi is not None:
                scores = scores + alibi[head].double() * (torch.arange(first, last + 1) - last)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().view(1)])
            weights = torch.softmax(scores, 0)[: last + 1 - first]
            out[j, head] = weights @ v[first : last + 1]
    return out


@dataclass
class Case:
    """A step over rows that already hold context_len - query_len tokens, and what it must give."""

    inputs: AttentionInputs
    cached: list[tuple[torch.Tensor, torch.Tensor]]  # per row: all keys, all values [context, kv_heads, d]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return int(self.inputs.block_tables.max()) + 1

    def only(self, row: int) -> Case:
        """The step with this row alone."""
        begin = sum(self.inputs.query_lens[:row])
        tokens = slice(begin, begin + self.inputs.query_lens[row])
        inputs = AttentionInputs(
            [self.inputs.query_lens[row]],
            [self.inputs.context_lens[row]],
            torch.tensor([0, self.inputs.query_lens[row]], dtype=torch.int32),
            self.inputs.context_lens_device[row : row + 1],
            self.inputs.block_tables[row : row + 1],
            self.inputs.slots[tokens],
        )
        return Case(inputs, [self.cached[row]], self.query[tokens], self.key[tokens], self.value[tokens])

    def fill(self, write, block_size) -> None:
        """Write the tokens of earlier steps through `write(key, value, slots)`."""
        for row, (keys, values) in enumerate(self.cached):
            begin = max(0, self.inputs.context_lens[row] - self.inputs.query_lens[row])
            positions = torch.arange(begin)
            table = self.inputs.block_tables[row].long()
            write(keys[:begin], values[:begin], table[positions // block_size] * block_size + positions % block_size)

    def expected(self, scale, window=None, softcap=None, sinks=None, alibi=None) -> torch.Tensor:
        out, token = [], 0
        for row, (keys, values) in enumerate(self.cached):
            q = self.inputs.query_lens[row]
            query = self.query[token : token + q]
            token += q
            if self.inputs.context_lens[row]:
                out.append(dense_attention(query, keys, values, scale, window, softcap, sinks, alibi))
            else:
                out.append(torch.zeros((*query.shape[:2], values.shape[2]), dtype=torch.float64))
        return torch.cat(out)


def make_case(rows, heads, kv_heads, head_dim, block_size, dtype=torch.float32, seed=0, value_dim=None) -> Case:
    """rows: (query_len, context_len); context_len 0 is padding on block 0."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(needed), generator=generator) + 1
    table = torch.zeros(len(rows), max(*needed, 1), dtype=torch.int32)
    cached, slots, used = [], [], 0
    for row, (query_len, context_len) in enumerate(rows):
        table[row, : needed[row]] = order[used : used + needed[row]]
        used += needed[row]
        wide = max(head_dim, value_dim or 0)
        both = torch.randn(2, context_len, kv_heads, wide, generator=generator).to(dtype)
        cached.append((both[0, :, :, :head_dim], both[1, :, :, : value_dim or head_dim]))
        positions = torch.arange(context_len - query_len, context_len).clamp(min=0)
        slots.append(table[row, positions // block_size].long() * block_size + positions % block_size)
        if context_len == 0:
            slots[-1] = torch.zeros(query_len, dtype=torch.int64)
    tokens = sum(query for query, _ in rows)
    fresh = [
        (keys[-query:], values[-query:])
        if context
        else tuple(
            torch.full((query, kv_heads, size), float("nan"), dtype=dtype) for size in (head_dim, value_dim or head_dim)
        )
        for (query, context), (keys, values) in zip(rows, cached, strict=True)
    ]
    lens = torch.tensor([query for query, _ in rows])
    inputs = AttentionInputs(
        query_lens=[query for query, _ in rows],
        context_lens=[context for _, context in rows],
        cu_seqlens_q=torch.cat([torch.zeros(1), lens.cumsum(0)]).int(),
        context_lens_device=torch.tensor([context for _, context in rows], dtype=torch.int32),
        block_tables=table,
        slots=torch.cat(slots),
    )
    query = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    key, value = (torch.cat(parts) for parts in zip(*fresh, strict=True))
    return Case(inputs, cached, query, key, value)


RAGGED = [(1, 1), (1, 70), (5, 5), (1, 33), (17, 40), (1, 64), (64, 64), (2, 130)]
