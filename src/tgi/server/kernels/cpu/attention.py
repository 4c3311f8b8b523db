"""Paged attention for CPUs: one worker for decode rows and prefill tiles, float32 inside. Knows the cache's layout and
a list of items; not how a step was planned.

Layout: keys [blocks, kv_heads, head_dim, 64], transposed, so that the scores of 64 tokens are one product; values
[blocks, kv_heads, 64, padded_dim], so that the mix is another. An item is a few queries of one row (with all the heads
that share a kv head) against that row's keys, or against one part of them. Its arithmetic depends on nothing but that
row: a row's result has the same bits in every batch and on any number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tgi.server.kernels.cpu.exact_math import exact_exp, of_order, order_of
from tgi.server.kernels.cpu.parallel import FIRST_ARGUMENT, NEXT_ITEM, NEXT_THREAD, NUM_ITEMS, atomic_add, worker
from tgi.server.kernels.cpu.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LANES,
    MAX_ROWS,
    WIDE,
    add_product,
    float_of_bits,
    load_float,
    load_int32,
    load_int64,
    store_float,
    store_int64,
)

BLOCK = WIDE  # tokens of a block
CHUNK = 256  # keys whose scores stand in the first-level cache at a time
PART = 512  # keys of a part: longer decode rows are cut into parts, whatever runs beside them

# Words of the worker's arguments; addresses in bytes, strides in elements. Real numbers are float32 bits.
(
    QUERY,
    QUERY_TOKEN_STRIDE,
    QUERY_HEAD_STRIDE,
    QUERY_KIND,
    OUT,  # [tokens, heads, value_dim], same kind
    KEYS,
    VALUES,
    CACHE_KIND,
    SCALE,
    WINDOW,  # 0: none
    SOFTCAP,  # 0: none
    SINKS,  # float32 [heads]; 0: none
    ALIBI,  # float32 [heads]; 0: none
    VALUE_DIM,
    TABLE,  # int32 [rows, TABLE_STRIDE]
    TABLE_STRIDE,
    ITEMS,  # int32 [items, ITEM_WORDS]
    NUM_KV_HEADS,
    GROUP,  # heads per kv head
    HEAD_DIM,
    PADDED_DIM,
    SCRATCH,
    SCRATCH_STRIDE,  # bytes of one thread
    PARTIALS,  # float32 [parts, kv_heads, partial_floats(...)]
    COUNTERS,  # int64 [parts, kv_heads], zero between calls
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 25)
NUM_ARGUMENTS = FIRST_ARGUMENT + 25

# Words of an item. Query j of it is token FIRST_TOKEN + j of the step and stands at position FIRST_POSITION + j.
ROW, FIRST_TOKEN, NUM_QUERIES, FIRST_POSITION, ITEM_PART, NUM_PARTS, FIRST_PARTIAL = range(7)  # ITEM_PART -1: all keys
ITEM_WORDS = 8

_LOWEST = np.float32(-np.inf)
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)


def scratch_bytes(max_queries: int, group: int, head_dim: int, padded_dim: int) -> int:
    """Of one thread: queries, scores, sums, best scores and totals of an item; whole cache lines."""
    rows = max_queries * group
    return -(-4 * rows * (head_dim + CHUNK + padded_dim + 2) // 64) * 64


def partial_floats(group: int, padded_dim: int) -> int:
    """Of one part of a decode row and kv head: sums, best scores, totals."""
    return group * (padded_dim + 2)


@njit(inline="always")
def _word(arguments, index):
    return load_int64(arguments + 8 * index)


@njit(inline="always")
def _read(address, index):
    return load_float(FLOAT32, address, index)


@njit(inline="always")
def _write(address, index, value):
    store_float(FLOAT32, address, index, value)


@njit(error_model="numpy")
def _multiply(kind, width, rows, columns, out, out_stride, left, left_stride, right, right_stride, n):
    """out[rows, columns] += left @ right for any rows and a multiple of LANES columns; `width` in bytes of the kind."""
    row = 0
    while row < rows:
        some = min(MAX_ROWS, rows - row)
        # Two even shares are better than a full and a tiny one.
        if some == MAX_ROWS and MAX_ROWS < rows - row < 2 * MAX_ROWS:
            some = (rows - row + 1) // 2
        a_left = left + 4 * left_stride * row
        a_out = out + 4 * out_stride * row
        column = 0
        while column < columns:
            part = WIDE if columns - column >= WIDE else LANES
            add_product(
                kind,
                some,
                part,
                a_out + 4 * column,
                out_stride,
                a_left,
                left_stride,
                right + width * column,
                right_stride,
                n,
            )
            column += part
        row += some


@njit(error_model="numpy")
def _load_queries(arguments, to, scale, first_token, num_queries, first_head, group, head_dim):
    kind = _word(arguments, QUERY_KIND)
    width = 4 if kind == FLOAT32 else 2
    for j in range(num_queries):
        for g in range(group):
            source = _word(arguments, QUERY) + width * (
                (first_token + j) * _word(arguments, QUERY_TOKEN_STRIDE)
                + (first_head + g) * _word(arguments, QUERY_HEAD_STRIDE)
            )
            line = to + 4 * (j * group + g) * head_dim
            if kind == FLOAT32:
                for d in range(head_dim):
                    _write(line, d, load_float(FLOAT32, source, d) * scale)
            elif kind == BFLOAT16:
                for d in range(head_dim):
                    _write(line, d, load_float(BFLOAT16, source, d) * scale)
            else:
                for d in range(head_dim):
                    _write(line, d, load_float(FLOAT16, source, d) * scale)


@njit(error_model="numpy")
def _store_result(arguments, token, head, sums, factor):
    value_dim = _word(arguments, VALUE_DIM)
    kind = _word(arguments, QUERY_KIND)
    num_heads = _word(arguments, NUM_KV_HEADS) * _word(arguments, GROUP)
    index = (token * num_heads + head) * value_dim
    out = _word(arguments, OUT)
    if kind == FLOAT32:
        for d in range(value_dim):
            store_float(FLOAT32, out, index + d, _read(sums, d) * factor)
    elif kind == BFLOAT16:
        for d in range(value_dim):
            store_float(BFLOAT16, out, index + d, _read(sums, d) * factor)
    else:
        for d in range(value_dim):
            store_float(FLOAT16, out, index + d, _read(sums, d) * factor)


@njit(error_model="numpy")
def _cap(scores, count, softcap):
    """softcap · tanh(score / softcap)"""
    for i in range(count):
        x = _read(scores, i) / softcap
        e = exact_exp(-_TWO * abs(x))
        t = (_ONE - e) / (_ONE + e)
        # x - x: a NaN score stays NaN
        _write(scores, i, softcap * (t if x > _ZERO else -t) + (x - x))


@njit(error_model="numpy")
def _lean(scores, begin, end, first_distance, slope):
    """scores[i] += slope · (first_distance + i), the distance of a key to its query (0 or less)"""
    for i in range(begin, end):
        _write(scores, i, _read(scores, i) + slope * np.float32(first_distance + i))


@njit(error_model="numpy")
def _best(scores, begin, end, best):
    order = order_of(best)
    for i in range(begin, end):
        order = max(order, order_of(_read(scores, i)))
    return of_order(order)


@njit(error_model="numpy", fastmath={"reassoc"})
def _exponentials(scores, begin, end, best):
    """scores -> exp(score - best) in place; their sum."""
    total = _ZERO
    for i in range(begin, end):
        distance = _read(scores, i) - best
        # distance - distance: exact_exp takes NaN for nothing, but a broken row must show.
        weight = exact_exp(distance)
        weight = weight if distance <= _ZERO else distance
        _write(scores, i, weight)
        total += weight
    return total


@njit(error_model="numpy")
def _finish(arguments, token, head, sums, best, total):
    """Divide by the total, a sink included, and store. A query that saw no key gives zeros."""
    sinks = _word(arguments, SINKS)
    if sinks != 0:
        sink = _read(sinks, head)
        if sink > best:
            shrink = exact_exp(best - sink)
            total = total * shrink + _ONE
            _store_result(arguments, token, head, sums, shrink / total)
            return
        if best > _LOWEST:
            total += exact_exp(sink - best)
    _store_result(arguments, token, head, sums, _ZERO if total == _ZERO else _ONE / total)


@njit(error_model="numpy")
def _attend(arguments, scratch, item, kv_head):
    group = _word(arguments, GROUP)
    head_dim = _word(arguments, HEAD_DIM)
    padded_dim = _word(arguments, PADDED_DIM)
    num_kv_heads = _word(arguments, NUM_KV_HEADS)
    kind = _word(arguments, CACHE_KIND)
    width = 4 if kind == FLOAT32 else 2
    window = _word(arguments, WINDOW)
    softcap = float_of_bits(np.int32(_word(arguments, SOFTCAP)))
    alibi = _word(arguments, ALIBI)
    scale = float_of_bits(np.int32(_word(arguments, SCALE)))
    first_token = np.int64(load_int32(item + 4 * FIRST_TOKEN))
    num_queries = np.int64(load_int32(item + 4 * NUM_QUERIES))
    first_position = np.int64(load_int32(item + 4 * FIRST_POSITION))
    part = np.int64(load_int32(item + 4 * ITEM_PART))
    table = _word(arguments, TABLE) + 4 * _word(arguments, TABLE_STRIDE) * np.int64(load_int32(item + 4 * ROW))
    first_head = kv_head * group
    rows = num_queries * group

    queries = scratch
    scores = queries + 4 * rows * head_dim
    sums = scores + 4 * rows * CHUNK
    bests = sums + 4 * rows * padded_dim
    totals = bests + 4 * rows
    _load_queries(arguments, queries, scale, first_token, num_queries, first_head, group, head_dim)
    for i in range(rows * padded_dim):
        _write(sums, i, _ZERO)
    for row in range(rows):
        _write(bests, row, _LOWEST)
        _write(totals, row, _ZERO)

    # Keys [begin, end) are seen by some query; whole blocks before `begin` are not read.
    begin = max(0, first_position + 1 - window) if window > 0 else 0
    end = first_position + num_queries
    if part >= 0:
        begin = max(begin, part * PART)
        end = min(end, (part + 1) * PART)
    chunk = begin // BLOCK * BLOCK
    while chunk < end:
        chunk_end = min(end, chunk + CHUNK)
        for row in range(rows):
            for i in range((chunk_end - chunk + BLOCK - 1) // BLOCK * BLOCK):
                _write(scores + 4 * row * CHUNK, i, _ZERO)
        block = chunk
        while block < chunk_end:
            keys = _word(arguments, KEYS) + width * head_dim * BLOCK * (
                np.int64(load_int32(table + 4 * (block // BLOCK))) * num_kv_heads + kv_head
            )
            _multiply(
                kind, width, rows, BLOCK, scores + 4 * (block - chunk), CHUNK, queries, head_dim, keys, BLOCK, head_dim
            )
            block += BLOCK

        for row in range(rows):
            line = scores + 4 * row * CHUNK
            position = first_position + row // group
            seen_begin = max(chunk, begin)
            if window > 0:
                seen_begin = max(seen_begin, position + 1 - window)
            seen_begin = min(seen_begin, chunk_end) - chunk
            seen_end = max(min(chunk_end, position + 1) - chunk, seen_begin)
            if softcap > _ZERO:
                _cap(line + 4 * seen_begin, seen_end - seen_begin, softcap)
            if alibi != 0:
                _lean(line, seen_begin, seen_end, chunk - position, _read(alibi, first_head + row % group))
            before = _read(bests, row)
            best = _best(line, seen_begin, seen_end, before)
            if best > _LOWEST or best != best:
                total = _exponentials(line, seen_begin, seen_end, best)
                shrink = exact_exp(before - best)
                _write(totals, row, _read(totals, row) * shrink + total)
                _write(bests, row, best)
                if shrink != _ONE:
                    for d in range(padded_dim):
                        _write(sums + 4 * row * padded_dim, d, _read(sums + 4 * row * padded_dim, d) * shrink)
            elif seen_begin < seen_end:
                # Nothing but NaN and -inf: no distribution, and the row must show it.
                _write(totals, row, best - best)
                seen_end = seen_begin
            for i in range(seen_begin):
                _write(line, i, _ZERO)
            for i in range(seen_end, chunk_end - chunk):
                _write(line, i, _ZERO)

        block = chunk
        while block < chunk_end:
            # Nothing outside [begin, end) is touched: a stranger's NaN there would pass through 0 · NaN.
            first = max(block, begin)
            count = min(block + BLOCK, chunk_end) - first
            if count > 0:
                values = _word(arguments, VALUES) + width * padded_dim * (
                    BLOCK * (np.int64(load_int32(table + 4 * (block // BLOCK))) * num_kv_heads + kv_head)
                    + first
                    - block
                )
                _multiply(
                    kind,
                    width,
                    rows,
                    padded_dim,
                    sums,
                    padded_dim,
                    scores + 4 * (first - chunk),
                    CHUNK,
                    values,
                    padded_dim,
                    count,
                )
            block += BLOCK
        chunk += CHUNK

    if part < 0:
        for row in range(rows):
            _finish(
                arguments,
                first_token + row // group,
                first_head + row % group,
                sums + 4 * row * padded_dim,
                _read(bests, row),
                _read(totals, row),
            )
        return

    floats = group * (padded_dim + 2)
    first_partial = np.int64(load_int32(item + 4 * FIRST_PARTIAL))
    partials = _word(arguments, PARTIALS) + 4 * floats * (first_partial * num_kv_heads + kv_head)
    step = 4 * floats * num_kv_heads
    for i in range(floats):  # sums, bests and totals lie behind each other in scratch too
        _write(partials + part * step, i, _read(sums, i))
    counter = _word(arguments, COUNTERS) + 8 * (first_partial * num_kv_heads + kv_head)
    num_parts = np.int64(load_int32(item + 4 * NUM_PARTS))
    if atomic_add(counter, 1) == num_parts - 1:
        store_int64(counter, 0)
        _join_parts(arguments, partials, step, num_parts, first_token, first_head, group, padded_dim)


@njit(error_model="numpy")
def _join_parts(arguments, partials, step, num_parts, token, first_head, group, padded_dim):
    """Whoever finishes last joins a row's parts, always in their order. The first part's memory becomes the sum."""
    for g in range(group):
        sums = partials + 4 * g * padded_dim
        bests = partials + 4 * (group * padded_dim + g)
        totals = bests + 4 * group
        best = _read(bests, 0)
        total = _read(totals, 0)
        for part in range(1, num_parts):
            other = _read(bests + part * step, 0)
            joined = other if other > best or other != other else best
            if joined > _LOWEST or joined != joined:
                shrink = exact_exp(best - joined)
                other_shrink = exact_exp(other - joined)
                total = total * shrink + _read(totals + part * step, 0) * other_shrink
                for d in range(padded_dim):
                    _write(sums, d, _read(sums, d) * shrink + _read(sums + part * step, d) * other_shrink)
                best = joined
            else:
                total += _read(totals + part * step, 0)
        _finish(arguments, token, first_head + g, sums, best, total)


@worker
def attention_worker(arguments):
    scratch = _word(arguments, SCRATCH) + _word(arguments, SCRATCH_STRIDE) * atomic_add(arguments + 8 * NEXT_THREAD, 1)
    num_kv_heads = _word(arguments, NUM_KV_HEADS)
    while True:
        index = atomic_add(arguments + 8 * NEXT_ITEM, 1)
        if index >= _word(arguments, NUM_ITEMS):
            return
        _attend(
            arguments,
            scratch,
            _word(arguments, ITEMS) + 4 * ITEM_WORDS * (index // num_kv_heads),
            index % num_kv_heads,
        )
