"""Write new keys and values into the paged cache of `attention`'s layout: keys transposed, values padded."""

from __future__ import annotations

from numba import njit

from tgi.server.kernels.cpu.parallel import FIRST_ARGUMENT, NEXT_ITEM, NUM_ITEMS, atomic_add, worker
from tgi.server.kernels.cpu.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    WIDE,
    load_float,
    load_int64,
    store_float,
)

BLOCK = WIDE
TOKENS = 32  # of an item: one kv head of so many tokens

# Words of the worker's arguments; addresses in bytes, strides in elements.
(
    KEY,
    KEY_TOKEN_STRIDE,
    KEY_HEAD_STRIDE,
    VALUE,
    VALUE_TOKEN_STRIDE,
    VALUE_HEAD_STRIDE,
    SOURCE_KIND,
    KEYS,
    VALUES,
    VALUE_DIM,
    CACHE_KIND,
    SLOTS,  # int64 [tokens]
    NUM_TOKENS,
    NUM_KV_HEADS,
    HEAD_DIM,
    PADDED_DIM,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 16)
NUM_ARGUMENTS = FIRST_ARGUMENT + 16


@njit(inline="always")
def _word(arguments, index):
    return load_int64(arguments + 8 * index)


@njit(inline="always")
def _load(kind, address, index):
    if kind == FLOAT32:
        return load_float(FLOAT32, address, index)
    if kind == BFLOAT16:
        return load_float(BFLOAT16, address, index)
    return load_float(FLOAT16, address, index)


@njit(inline="always")
def _store(kind, address, index, value):
    if kind == FLOAT32:
        store_float(FLOAT32, address, index, value)
    elif kind == BFLOAT16:
        store_float(BFLOAT16, address, index, value)
    else:
        store_float(FLOAT16, address, index, value)


@worker
def write_worker(arguments):
    num_kv_heads = _word(arguments, NUM_KV_HEADS)
    head_dim = _word(arguments, HEAD_DIM)
    value_dim = _word(arguments, VALUE_DIM)
    padded_dim = _word(arguments, PADDED_DIM)
    source_kind = _word(arguments, SOURCE_KIND)
    cache_kind = _word(arguments, CACHE_KIND)
    source_width = 4 if source_kind == FLOAT32 else 2
    while True:
        item = atomic_add(arguments + 8 * NEXT_ITEM, 1)
        if item >= _word(arguments, NUM_ITEMS):
            return
        head = item % num_kv_heads
        first = item // num_kv_heads * TOKENS
        for token in range(first, min(first + TOKENS, _word(arguments, NUM_TOKENS))):
            slot = load_int64(_word(arguments, SLOTS) + 8 * token)
            place = slot // BLOCK * num_kv_heads + head  # which [.., ..] of a block and head
            offset = slot % BLOCK
            key = _word(arguments, KEY) + source_width * (
                token * _word(arguments, KEY_TOKEN_STRIDE) + head * _word(arguments, KEY_HEAD_STRIDE)
            )
            value = _word(arguments, VALUE) + source_width * (
                token * _word(arguments, VALUE_TOKEN_STRIDE) + head * _word(arguments, VALUE_HEAD_STRIDE)
            )
            keys = place * head_dim * BLOCK + offset
            values = (place * BLOCK + offset) * padded_dim
            for d in range(head_dim):
                _store(cache_kind, _word(arguments, KEYS), keys + d * BLOCK, _load(source_kind, key, d))
            for d in range(value_dim):
                _store(cache_kind, _word(arguments, VALUES), values + d, _load(source_kind, value, d))
