"""Op paged_attention: causal attention of ragged rows over a paged cache. Signature and torch reference.

The reference computes in float32 on any device and is the oracle of every attention kernel. It never waits for the
device: shapes come from the spans, which the caller planned from host numbers; all that is data stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Elements of one intermediate of the reference (gathered keys, scores): bounds its memory to some 256 MiB each.
_MAX_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring rows with one query length, computed together."""

    first_row: int
    num_rows: int
    first_token: int
    query_len: int
    max_context_len: int


def plan_spans(query_lens: Sequence[int], context_lens: Sequence[int], elements_per_key: int) -> list[Span]:
    """Cut the rows of a step into spans. `elements_per_key` = kv_heads * head_dim, for the bound on gathered memory.

    Rows with query_len 0 take no part.
    """
    spans: list[Span] = []
    token = 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        last = spans[-1] if spans else None
        if last is not None and query_len == last.query_len and row == last.first_row + last.num_rows:
            longest = max(context_len, last.max_context_len)
            if (last.num_rows + 1) * longest * elements_per_key <= _MAX_ELEMENTS:
                spans[-1] = Span(last.first_row, last.num_rows + 1, last.first_token, query_len, longest)
                token += query_len
                continue
        if query_len > 0:
            spans.append(Span(row, 1, token, query_len, context_len))
            token += query_len
    return spans


def paged_attention(
    query: torch.Tensor,  # [tokens, heads, head_dim], any strides
    key_cache: torch.Tensor,  # [blocks, kv_heads, block, head_dim]
    value_cache: torch.Tensor,  # [blocks, kv_heads, block, value_dim]
    block_tables: torch.Tensor,  # [rows, max_blocks] int32
    context_lens: torch.Tensor,  # [rows] int32
    spans: Sequence[Span],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
    alibi: torch.Tensor | None = None,  # [heads] float32
) -> torch.Tensor:
    """Query j of a row sits at position context_len - query_len + j and sees the keys at positions up to its own, the
    last `window` of them where given. scores = scale * q·k, then softcap * tanh(scores / softcap) where given, plus
    alibi * (key position - query position) where given; a sink is one more score in the denominator, without a value.

    Returns [tokens, heads, value_dim] in the query's dtype. A query that sees no key (padding) gives zeros; tokens
    outside all spans too.
    """
    out = torch.zeros((*query.shape[:2], value_cache.shape[3]), dtype=query.dtype, device=query.device)
    for span in spans:
        if span.max_context_len > 0:
            _attend_span(
                out,
                query,
                key_cache,
                value_cache,
                block_tables,
                context_lens,
                span,
                scale,
                window,
                softcap,
                sinks,
                alibi,
            )
    return out


def _attend_span(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    span: Span,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi: torch.Tensor | None,
) -> None:
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    value_dim = value_cache.shape[3]
    num_heads = query.shape[1]
    group = num_heads // num_kv_heads
    n, q = span.num_rows, span.query_len
    rows = slice(span.first_row, span.first_row + n)
    num_blocks = -(-span.max_context_len // block_size)
    num_keys = num_blocks * block_size

    table = block_tables[rows, :num_blocks].long()
    lens = context_lens[rows].view(n, 1).long()
    key_positions = torch.arange(num_keys, device=query.device)
    # [n, blocks, kv_heads, block, dim] -> [n, kv_heads, 1, keys, dim]
    keys = key_cache[table].transpose(1, 2).reshape(n, num_kv_heads, 1, num_keys, head_dim).float()
    values = value_cache[table].transpose(1, 2).reshape(n, num_kv_heads, 1, num_keys, value_dim).float()
    # What stands behind a row's end was left by somebody else: 0 · NaN would bring a stranger's fault here.
    values = values.masked_fill((key_positions >= lens).view(n, 1, 1, num_keys, 1), 0.0)

    sink = None if sinks is None else sinks.float().view(1, num_kv_heads, group, 1, 1)
    slopes = None if alibi is None else alibi.float().view(1, num_kv_heads, group, 1, 1)
    chunk = max(1, _MAX_ELEMENTS // (n * num_heads * num_keys))
    for begin in range(0, q, chunk):
        size = min(chunk, q - begin)
        queries = query[span.first_token : span.first_token + n * q].unflatten(0, (n, q))[:, begin : begin + size]
        # [n, size, heads, head_dim] -> [n, kv_heads, group, size, head_dim]
        queries = queries.float().view(n, size, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale  # [n, kv_heads, group, size, keys]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions = lens - q + begin + torch.arange(size, device=query.device)  # [n, size]
        if slopes is not None:
            distances = (key_positions - positions.unsqueeze(-1)).float()  # [n, size, keys]
            scores = scores + slopes * distances.view(n, 1, 1, size, num_keys)
        hidden = key_positions > positions.unsqueeze(-1)
        if window is not None:
            hidden = hidden | (key_positions <= positions.unsqueeze(-1) - window)
        scores = scores.masked_fill(hidden.view(n, 1, 1, size, num_keys), float("-inf"))
        peak = scores.amax(-1, keepdim=True)
        if sink is not None:
            peak = torch.maximum(peak, sink)
        peak = peak.clamp(min=torch.finfo(torch.float32).min)  # a query that sees nothing: exp(-inf - finite) = 0
        weights = torch.exp(scores - peak)
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - peak)
        mixed = torch.matmul(weights, values) / total.clamp(min=torch.finfo(torch.float32).tiny)
        target = out[span.first_token : span.first_token + n * q].unflatten(0, (n, q))[:, begin : begin + size]
        target.copy_(mixed.permute(0, 3, 1, 2, 4).reshape(n, size, num_heads, value_dim))
