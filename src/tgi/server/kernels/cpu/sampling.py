"""Choosing the next id on a CPU: one pass of a row through the caches instead of a tensor operation per step.

Computes what `sampling/sampler.py` describes and composes from torch; ids are the same. Most of a row is never looked
at twice: blocks of 64 tokens whose best cannot win, or cannot be among the kept, are passed over.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]

from tgi.server.kernels.cpu.exact_math import exact_exp, exact_gumbel, of_order, order_of
from tgi.server.kernels.cpu.parallel import (
    FIRST_ARGUMENT,
    NEXT_ITEM,
    NEXT_THREAD,
    NUM_ITEMS,
    atomic_add,
    max_threads,
    run,
    worker,
)
from tgi.server.kernels.cpu.vector import (
    bits_of_float,
    float32_at,
    float_of_bits,
    int32_at,
    int64_at,
    load_int64,
    uint8_at,
)
from tgi.server.kernels.sampling_words import (
    FLAG_RAW,
    FLAG_SAMPLED,
    FLAGS,
    MIN_P,
    NUM_WORDS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

(
    LOGITS,  # float32 [n, ROW_STRIDE]
    ROW_STRIDE,
    VOCAB_SIZE,
    ROWS,  # int64 [n], 0: every row is greedy
    POSITIONS,  # int64 [n]
    TABLE,  # int32 [.., NUM_WORDS]
    IDS,  # int64 [n]
    LOGPROBS,  # float32 [n]
    IS_NAN,  # uint8 [n]
    SHOWN,  # float32 [n, VOCAB_SIZE]: scores that logprobs are taken from; 0: not wanted
    NORMALIZERS,  # float32 [n]
    SCRATCH,
    SCRATCH_STRIDE,  # bytes of one thread
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 13)
NUM_ARGUMENTS = FIRST_ARGUMENT + 13

_BLOCK = 64
_RANK_MASK = np.int32(0x7FFFFFFF)
_NO_RANK = np.int32(0x7F800000)  # of a score of -inf, the last
_MAX_NOISE = np.float32(17.5)  # exact_gumbel reaches 17.33
_MASS_ONE = np.float32(2.0**40)
_SCALE = 2.0**-40
_INF, _NAN, _ZERO = np.float32(np.inf), np.float32(np.nan), np.float32(0)
# How far below the best, in nats, candidates of top-p are sought, in turn, until their mass suffices.
_REACH = (np.float32(4.0), np.float32(9.0), np.float32(20.0), _INF)
# So many kept tokens get their noise one by one; more of them, in blocks of vectors.
_FEW = 4096
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_K0, _K1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF_WORD = np.uint64(0xFFFFFFFF), np.uint64(32)


@njit(error_model="numpy")
def _best_of(logits, begin, end):
    """Best logit and number of NaN of a block; the best is meaningless where there are any."""
    order = order_of(-_INF)
    broken = np.int32(0)
    for i in range(begin, end):
        x = logits[i]
        order = max(order, order_of(x))
        broken += np.int32((bits_of_float(x) & _RANK_MASK) > _NO_RANK)
    return of_order(order), broken


@njit(error_model="numpy", fastmath={"reassoc"})
def _sum_exp(values, begin, end, best):
    total = _ZERO
    for i in range(begin, end):
        total += exact_exp(values[i] - best)
    return total


@njit(error_model="numpy")
def _normalizer(values, size, best):
    """log of the sum of exp(value - best)."""
    total = 0.0
    for begin in range(0, size, 1024):
        total += _sum_exp(values, begin, min(begin + 1024, size), best)
    return np.float32(np.log(total))


@njit(error_model="numpy")
def _find(values, begin, value):
    i = begin
    while values[i] != value:
        i += 1
    return i


@njit(error_model="numpy")
def _total_mass(scores, size):
    total = np.int64(0)
    for i in range(size):
        total += np.int64(exact_exp(scores[i]) * _MASS_ONE)
    return total


@njit(error_model="numpy")
def _count_within(ranks, size, limit):
    count = np.int32(0)
    for i in range(size):
        count += np.int32(ranks[i] <= limit)
    return np.int64(count)


@njit(error_model="numpy")
def _mass_within(ranks, masses, size, limit):
    total = np.int64(0)
    for i in range(size):
        total += masses[i] if ranks[i] <= limit else np.int64(0)
    return total


@njit(error_model="numpy")
def _rank_of_count(ranks, size, count):
    """Smallest limit with `count` ranks within it, at most `size`."""
    low, high = np.int32(-1), _NO_RANK
    while high - low > 1:
        middle = np.int32(low + ((high - low) >> 1))
        if _count_within(ranks, size, middle) >= count:
            high = middle
        else:
            low = middle
    return high


@njit(error_model="numpy")
def _rank_of_mass(ranks, masses, size, mass):
    low, high = np.int32(-1), _NO_RANK
    while high - low > 1:
        middle = np.int32(low + ((high - low) >> 1))
        if _mass_within(ranks, masses, size, middle) >= mass:
            high = middle
        else:
            low = middle
    return high


@njit(error_model="numpy")
def _collect(scores, vocab_size, block_ranks, limit, ids, ranks):
    """Tokens with ranks within the limit, in the order of ids; how many."""
    count = 0
    for block in range(block_ranks.size):
        if block_ranks[block] <= limit:
            for i in range(block * _BLOCK, min((block + 1) * _BLOCK, vocab_size)):
                rank = bits_of_float(scores[i]) & _RANK_MASK
                if rank <= limit:
                    ids[count] = i
                    ranks[count] = rank
                    count += 1
    return count


@njit(error_model="numpy")
def _philox(position, seed, first_quad, count, words):
    """Words of the tokens 4 · first_quad and following."""
    for i in range(count):
        c0 = position & _LOW
        c1 = position >> _HALF_WORD
        c2 = np.uint64(first_quad + i)
        c3 = np.uint64(0)
        k0 = seed & _LOW
        k1 = seed >> _HALF_WORD
        for _ in range(10):
            p0 = c0 * _M0
            p1 = c2 * _M1
            c0 = (p1 >> _HALF_WORD) ^ c1 ^ k0
            c1 = p1 & _LOW
            c2 = (p0 >> _HALF_WORD) ^ c3 ^ k1
            c3 = p0 & _LOW
            k0 = (k0 + _K0) & _LOW
            k1 = (k1 + _K1) & _LOW
        words[4 * i] = np.int64(c0)
        words[4 * i + 1] = np.int64(c1)
        words[4 * i + 2] = np.int64(c2)
        words[4 * i + 3] = np.int64(c3)


@njit(error_model="numpy")
def _best_noisy(scores, begin, count, words, noisy):
    """noisy = scores + noise of one block; the best."""
    order = order_of(-_INF)
    for i in range(count):
        value = scores[begin + i] + exact_gumbel(words[i])
        noisy[i] = value
        order = max(order, order_of(value))
    return of_order(order)


@njit(error_model="numpy")
def _choose_all(scores, vocab_size, block_ranks, best_id, position, seed, words, noisy):
    """argmax of score + noise over the whole row; lower ids win among equals."""
    chosen, chosen_value = np.int64(-1), -_INF
    first = best_id // _BLOCK  # holds the best score: after it few other blocks have a chance
    for turn in range(block_ranks.size + 1):
        block = first if turn == 0 else turn - 1
        if turn > 0 and (block == first or _MAX_NOISE - float_of_bits(block_ranks[block]) < chosen_value):
            continue
        begin = block * _BLOCK
        count = min(_BLOCK, vocab_size - begin)
        _philox(position, seed, begin // 4, (count + 3) // 4, words)
        best = _best_noisy(scores, begin, count, words, noisy)
        if best > chosen_value or (best == chosen_value and begin < chosen):
            chosen, chosen_value = begin + _find(noisy, 0, best), best
    return chosen


@njit(error_model="numpy")
def _choose_among(scores, ids, count, position, seed, words):
    chosen, chosen_value = np.int64(-1), -_INF
    for i in range(count):
        token = np.int64(ids[i])
        if _MAX_NOISE + scores[token] < chosen_value:
            continue
        _philox(position, seed, token // 4, 1, words)
        value = scores[token] + exact_gumbel(words[token % 4])
        if value > chosen_value:
            chosen, chosen_value = token, value
    return chosen


@njit(error_model="numpy")
def _drop_others(scores, vocab_size, block_ranks, ids, count):
    """Scores of tokens that are not in `ids` (ascending) become -inf; an id in the block of the best."""
    token = 0
    for i in range(count):
        while token < ids[i]:
            scores[token] = -_INF
            token += 1
        token += 1
    for other in range(token, vocab_size):
        scores[other] = -_INF
    best_id, best_rank = np.int64(0), _NO_RANK
    for block in range(block_ranks.size):
        rank = _NO_RANK
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, vocab_size)):
            rank = min(rank, bits_of_float(scores[i]) & _RANK_MASK)
        block_ranks[block] = rank
        if rank < best_rank:
            best_id, best_rank = block * _BLOCK, rank
    return best_id


@njit(error_model="numpy")
def _scale(logits, vocab_size, best, temperature, scores, block_ranks):
    for block in range(block_ranks.size):
        begin = block * _BLOCK
        end = min(begin + _BLOCK, vocab_size)
        rank = _NO_RANK
        for i in range(begin, end):
            score = (logits[i] - best) / temperature
            scores[i] = score
            other = bits_of_float(score) & _RANK_MASK
            rank = min(rank, other)
        block_ranks[block] = rank


@njit(error_model="numpy")
def _keep(scores, vocab_size, block_ranks, top_k, top_p, min_p, ids, ranks, masses):
    """Tokens that may still be chosen, in the order of ids: how many, and their mass."""
    needed = np.int64(1)
    count = 0
    if top_k > 0:
        limit = _NO_RANK
        if top_k <= block_ranks.size:
            # k blocks have a token within this limit, so the k best tokens are within it.
            limit = _rank_of_count(block_ranks, block_ranks.size, top_k)
        count = _collect(scores, vocab_size, block_ranks, limit, ids, ranks)
        if top_k < count:
            count = _only_within(ids, ranks, count, _rank_of_count(ranks, count, top_k))
        needed = _share(top_p, _fill_masses(ranks, masses, count))
    elif top_p < np.float32(1):
        needed = _share(top_p, _total_mass(scores, vocab_size))
        for reach in _REACH:
            count = _collect(scores, vocab_size, block_ranks, bits_of_float(reach), ids, ranks)
            if _fill_masses(ranks, masses, count) >= needed:
                break
    else:
        # One part in a hundred further than min-p reaches: rounding stays on the safe side.
        reach = np.float32(0.01) - np.float32(np.log(min_p))
        count = _collect(scores, vocab_size, block_ranks, bits_of_float(reach), ids, ranks)
        _fill_masses(ranks, masses, count)

    if top_p < np.float32(1):
        border = _rank_of_mass(ranks, masses, count, needed)
        room = needed - _mass_within(ranks, masses, count, border - np.int32(1))
        kept = 0
        for i in range(count):
            if ranks[i] == border:
                if room <= 0:
                    continue
                room -= max(masses[i], np.int64(1))
            elif ranks[i] > border:
                continue
            ids[kept] = ids[i]
            masses[kept] = masses[i]
            kept += 1
        count = kept
    if min_p > _ZERO:
        kept = 0
        for i in range(count):
            if exact_exp(scores[ids[i]]) >= min_p:
                ids[kept] = ids[i]
                masses[kept] = masses[i]
                kept += 1
        count = kept
    total = np.int64(0)
    for i in range(count):
        total += masses[i]
    return count, total


@njit(error_model="numpy")
def _share(top_p, total):
    return max(np.int64(np.float64(top_p) * np.float64(total)), np.int64(1))


@njit(error_model="numpy")
def _only_within(ids, ranks, count, limit):
    kept = 0
    for i in range(count):
        if ranks[i] <= limit:
            ids[kept] = ids[i]
            ranks[kept] = ranks[i]
            kept += 1
    return kept


@njit(error_model="numpy")
def _fill_masses(ranks, masses, count):
    total = np.int64(0)
    for i in range(count):
        masses[i] = np.int64(exact_exp(-float_of_bits(ranks[i])) * _MASS_ONE)
        total += masses[i]
    return total


@njit(inline="always")
def _word(arguments, index):
    return load_int64(arguments + 8 * index)


@njit(error_model="numpy")
def _show(arguments, index, logits, scores, ids, count, vocab_size, is_cut, is_raw, best):
    """Scores that logprobs are taken from, for the best tokens: raw logits, or what the warpers left."""
    if _word(arguments, SHOWN) == 0:
        return
    shown = carray(float32_at(_word(arguments, SHOWN) + 4 * vocab_size * index), (vocab_size,))
    if is_raw:
        for i in range(vocab_size):
            shown[i] = logits[i] - best
    elif is_cut:
        for i in range(vocab_size):
            shown[i] = -_INF
        for i in range(count):
            shown[ids[i]] = scores[ids[i]]
    else:
        for i in range(vocab_size):
            shown[i] = scores[i]


@njit(error_model="numpy")
def _sample_row(arguments, scratch, index):
    vocab_size = _word(arguments, VOCAB_SIZE)
    logits = carray(float32_at(_word(arguments, LOGITS) + 4 * _word(arguments, ROW_STRIDE) * index), (vocab_size,))
    out_id = carray(int64_at(_word(arguments, IDS) + 8 * index), (1,))
    out_logprob = carray(float32_at(_word(arguments, LOGPROBS) + 4 * index), (1,))
    out_is_nan = carray(uint8_at(_word(arguments, IS_NAN) + index), (1,))
    out_normalizer = carray(float32_at(_word(arguments, NORMALIZERS) + 4 * index), (1,))
    num_blocks = (vocab_size + _BLOCK - 1) // _BLOCK
    scores = carray(float32_at(scratch), (vocab_size,))
    block_ranks = carray(int32_at(scratch + 4 * _BLOCK * num_blocks), (num_blocks,))
    lists = scratch + 4 * (_BLOCK + 1) * num_blocks
    lists = (lists + 63) // 64 * 64
    masses = carray(int64_at(lists), (vocab_size,))
    ids = carray(int32_at(lists + 8 * _BLOCK * num_blocks), (vocab_size,))
    ranks = carray(int32_at(lists + 12 * _BLOCK * num_blocks), (vocab_size,))
    words = carray(int64_at(lists + 16 * _BLOCK * num_blocks), (_BLOCK,))
    noisy = carray(float32_at(lists + 16 * _BLOCK * num_blocks + 8 * _BLOCK), (_BLOCK,))

    best, best_block, broken = -_INF, 0, np.int32(0)
    for begin in range(0, vocab_size, 1024):
        other, other_broken = _best_of(logits, begin, min(begin + 1024, vocab_size))
        broken += other_broken
        if other > best:
            best, best_block = other, begin
    if broken > 0 or best == _INF or best == -_INF:
        out_id[0], out_logprob[0], out_is_nan[0], out_normalizer[0] = 0, _NAN, 1, _NAN
        _show(arguments, index, logits, logits, ids, 0, vocab_size, True, False, best)
        return
    best_id = _find(logits, best_block, best)
    out_is_nan[0] = 0

    flags = np.int32(0)
    words_of_row = carray(int32_at(_word(arguments, TABLE)), (1,))
    if _word(arguments, ROWS) != 0:
        row = load_int64(_word(arguments, ROWS) + 8 * index)
        words_of_row = carray(int32_at(_word(arguments, TABLE) + 4 * NUM_WORDS * row), (NUM_WORDS,))
        flags = words_of_row[FLAGS]
    if flags & FLAG_SAMPLED == 0:
        normalizer = _normalizer(logits, vocab_size, best)
        out_id[0], out_logprob[0], out_normalizer[0] = best_id, -normalizer, normalizer
        _show(arguments, index, logits, logits, ids, 0, vocab_size, False, True, best)
        return

    position = np.uint64(load_int64(_word(arguments, POSITIONS) + 8 * index))
    seed = (np.uint64(words_of_row[SEED_HIGH]) << _HALF_WORD) | (np.uint64(words_of_row[SEED_LOW]) & _LOW)
    top_k = np.int64(words_of_row[TOP_K])
    top_p = float_of_bits(words_of_row[TOP_P])
    min_p = float_of_bits(words_of_row[MIN_P])
    _scale(logits, vocab_size, best, float_of_bits(words_of_row[TEMPERATURE]), scores, block_ranks)
    is_cut = 0 < top_k < vocab_size or top_p < np.float32(1) or min_p > _ZERO
    count = 0
    normalizer = _ZERO
    if is_cut:
        count, total = _keep(scores, vocab_size, block_ranks, top_k, top_p, min_p, ids, ranks, masses)
        normalizer = np.float32(np.log(np.float64(total) * _SCALE))
        if count <= _FEW:
            chosen = _choose_among(scores, ids, count, position, seed, words)
        else:
            best_id = _drop_others(scores, vocab_size, block_ranks, ids, count)
            chosen = _choose_all(scores, vocab_size, block_ranks, best_id, position, seed, words, noisy)
    else:
        chosen = _choose_all(scores, vocab_size, block_ranks, best_id, position, seed, words, noisy)
        if flags & FLAG_RAW == 0:
            normalizer = _normalizer(scores, vocab_size, _ZERO)
    if flags & FLAG_RAW != 0:
        normalizer = _normalizer(logits, vocab_size, best)
        out_logprob[0] = (logits[chosen] - best) - normalizer
    else:
        out_logprob[0] = scores[chosen] - normalizer
    out_id[0], out_normalizer[0] = chosen, normalizer
    _show(arguments, index, logits, scores, ids, count, vocab_size, is_cut, flags & FLAG_RAW != 0, best)


@worker
def sampling_worker(arguments):
    scratch = _word(arguments, SCRATCH) + _word(arguments, SCRATCH_STRIDE) * atomic_add(arguments + 8 * NEXT_THREAD, 1)
    while True:
        index = atomic_add(arguments + 8 * NEXT_ITEM, 1)
        if index >= _word(arguments, NUM_ITEMS):
            return
        _sample_row(arguments, scratch, index)


_kept = threading.local()  # scratch of each thread that samples: fresh pages each step would cost more than the step


def _scratch_bytes(vocab_size: int) -> int:
    num_blocks = -(-vocab_size // _BLOCK)
    return (4 * (_BLOCK + 1) * num_blocks + 16 * _BLOCK * num_blocks + 12 * _BLOCK + 127) // 64 * 64


def sample(
    logits: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    greedy_only: bool,
    with_scores: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """As `ops.sampling.sample`."""
    n, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, positions = rows.contiguous(), positions.contiguous()
    # The kernel sees addresses alone.
    assert logits.dtype == torch.float32, "logits are float32"
    assert rows.dtype == positions.dtype == torch.int64, "rows and positions are int64"
    ids = torch.empty(n, dtype=torch.int64)
    logprobs = torch.empty(n)
    is_nan = torch.empty(n, dtype=torch.bool)
    normalizers = torch.empty(n)
    shown = torch.empty(n, vocab_size) if with_scores else None
    stride = _scratch_bytes(vocab_size)
    scratch = getattr(_kept, "scratch", None)
    if scratch is None or scratch.numel() < stride * max_threads():
        scratch = _kept.scratch = torch.empty(stride * max_threads(), dtype=torch.uint8)
    words = np.zeros(NUM_ARGUMENTS, np.int64)
    words[NUM_ITEMS] = n
    words[LOGITS : SCRATCH_STRIDE + 1] = (
        logits.data_ptr(), logits.stride(0), vocab_size,
        0 if greedy_only else rows.data_ptr(), positions.data_ptr(), table.data_ptr(),
        ids.data_ptr(), logprobs.data_ptr(), is_nan.data_ptr(),
        0 if shown is None else shown.data_ptr(), normalizers.data_ptr(),
        scratch.data_ptr(), stride,
    )  # fmt: skip
    run(sampling_worker(), words.ctypes.data, alone=n == 1, max_workers=scratch.numel() // stride)
    return ids, logprobs, is_nan, shown, normalizers


def warmup() -> None:
    """Compile, or read the code from numba's cache."""
    sampling_worker()
