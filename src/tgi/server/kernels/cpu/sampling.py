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
    BAD_WORDS_SLOT,
    BAN_UNTIL,
    COUNT_SLOT,
    EDIT_SLOT,
    FLAG_BAD_WORDS,
    FLAG_BANNED,
    FLAG_BIASED,
    FLAG_PENALISED,
    FLAG_RAW,
    FLAG_SAMPLED,
    FLAG_WATERMARK,
    FLAGS,
    FLAGS_PROCESSED,
    FREQUENCY,
    IN_PROMPT,
    LAST_ID,
    MIN_P,
    NUM_WORDS,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    WATERMARK_DOMAIN,
    WATERMARK_KEY,
    RowTables,
)

(
    LOGITS,  # float32 [n, ROW_STRIDE]
    ROW_STRIDE,
    VOCAB_SIZE,
    ROWS,  # int64 [n], 0: every row is greedy, and nothing changes its logits
    POSITIONS,  # int64 [n]
    TABLE,  # int32 [.., NUM_WORDS]
    COUNTS,  # int32 [slots, VOCAB_SIZE]
    EDIT_IDS,  # int64 [slots, EDIT_WIDTH]
    EDIT_VALUES,  # float32 [slots, EDIT_WIDTH]
    EDIT_WIDTH,
    BAD_WORDS,  # int32 [slots, NUM_BAD_WORDS, BAD_WORD_LENGTH]
    NUM_BAD_WORDS,
    BAD_WORD_LENGTH,
    TAILS,  # int32 [slots, BAD_WORD_LENGTH - 1]
    GREEN_LIMIT,
    GREEN_DELTA,  # float32 bits
    ALLOWED,  # int32 [n, ceil(VOCAB_SIZE / 32)], 0: everything is
    IDS,  # int64 [n]
    LOGPROBS,  # float32 [n]
    IS_NAN,  # uint8 [n]
    SHOWN,  # float32 [n, VOCAB_SIZE]: scores that logprobs are taken from; 0: not wanted
    NORMALIZERS,  # float32 [n]
    SCRATCH,
    SCRATCH_STRIDE,  # bytes of one thread
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 24)
NUM_ARGUMENTS = FIRST_ARGUMENT + 24

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
_NOISE, _WATERMARK = np.uint64(0), np.uint64(WATERMARK_DOMAIN)
_OUTPUT_COUNT = np.int32(IN_PROMPT - 1)
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
def _philox(position, seed, domain, first_quad, count, words):
    """Words of the tokens 4 · first_quad and following."""
    for i in range(count):
        c0 = position & _LOW
        c1 = position >> _HALF_WORD
        c2 = np.uint64(first_quad + i)
        c3 = np.uint64(domain)
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
        _philox(position, seed, _NOISE, begin // 4, (count + 3) // 4, words)
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
        _philox(position, seed, _NOISE, token // 4, 1, words)
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
def _keep(scores, vocab_size, block_ranks, top_k, top_p, min_p, typical_p, ids, ranks, masses):
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
    elif min_p <= _ZERO:
        count = _collect(scores, vocab_size, block_ranks, _NO_RANK - np.int32(1), ids, ranks)
        _fill_masses(ranks, masses, count)
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
    if typical_p < np.float32(1):
        count = _only_typical(scores, ids, masses, count, typical_p, ranks)
    return count, _sum(masses, count)


@njit(error_model="numpy")
def _sum(masses, count):
    total = np.int64(0)
    for i in range(count):
        total += masses[i]
    return total


@njit(error_model="numpy")
def _only_typical(scores, ids, masses, count, typical_p, distances):
    """Of the tokens, those whose score is nearest to the mean, until their share suffices; equals of the last too."""
    moment = np.int64(0)
    for i in range(count):
        if masses[i] > 0:
            score = scores[ids[i]]
            moment += np.int64(exact_exp(score) * score * _MASS_ONE)
    total = _sum(masses, count)
    mean = np.float32(np.float64(moment) / np.float64(total))
    for i in range(count):
        distances[i] = bits_of_float(scores[ids[i]] - mean) & _RANK_MASK
    limit = _rank_of_mass(distances, masses, count, _share(typical_p, total))
    kept = 0
    for i in range(count):
        if distances[i] <= limit:
            ids[kept] = ids[i]
            masses[kept] = masses[i]
            kept += 1
    return kept


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
def _add_edits(arguments, words_of_row, scores, with_bans):
    """Biases, or the bans, whose values are -inf."""
    width = _word(arguments, EDIT_WIDTH)
    entry = width * np.int64(words_of_row[EDIT_SLOT])
    ids = carray(int64_at(_word(arguments, EDIT_IDS) + 8 * entry), (width,))
    values = carray(float32_at(_word(arguments, EDIT_VALUES) + 4 * entry), (width,))
    for i in range(width):
        if (values[i] == -_INF) == with_bans:
            scores[ids[i]] += values[i]


@njit(error_model="numpy")
def _add_watermark(arguments, words_of_row, scores, words):
    limit = _word(arguments, GREEN_LIMIT)
    delta = float_of_bits(np.int32(_word(arguments, GREEN_DELTA)))
    key = np.uint64(np.int64(words_of_row[LAST_ID]) * np.int64(WATERMARK_KEY))
    for begin in range(0, scores.size, _BLOCK):
        count = min(_BLOCK, scores.size - begin)
        _philox(np.uint64(0), key, _WATERMARK, begin // 4, (count + 3) // 4, words)
        for i in range(count):
            if words[i] < limit:
                scores[begin + i] += delta


@njit(error_model="numpy")
def _penalise(arguments, words_of_row, scores):
    slot = np.int64(words_of_row[COUNT_SLOT])
    counts = carray(int32_at(_word(arguments, COUNTS) + 4 * scores.size * slot), (scores.size,))
    repetition = float_of_bits(words_of_row[REPETITION])
    frequency = float_of_bits(words_of_row[FREQUENCY])
    presence = float_of_bits(words_of_row[PRESENCE])
    for i in range(scores.size):
        if counts[i] != 0:
            score = scores[i]
            score = score * repetition if score < _ZERO else score / repetition
            count = counts[i] & _OUTPUT_COUNT
            scores[i] = score - (np.float32(count) * frequency + (presence if count > 0 else _ZERO))


@njit(error_model="numpy")
def _mask(allowed, scores):
    for i in range(scores.size):
        if (allowed[i >> 5] >> np.int32(i & 31)) & np.int32(1) == 0:
            scores[i] = -_INF


@njit(error_model="numpy")
def _has_other(scores, arguments, words_of_row):
    """Is anything possible but the row's banned ids? Counts, since a ban names an id once."""
    width = _word(arguments, EDIT_WIDTH)
    entry = width * np.int64(words_of_row[EDIT_SLOT])
    ids = carray(int64_at(_word(arguments, EDIT_IDS) + 8 * entry), (width,))
    values = carray(float32_at(_word(arguments, EDIT_VALUES) + 4 * entry), (width,))
    possible = 0
    for i in range(scores.size):
        possible += np.int64(scores[i] > -_INF)
    for i in range(width):
        if values[i] == -_INF and scores[ids[i]] > -_INF:
            possible -= 1
    return possible > 0


@njit(error_model="numpy")
def _is_near(word, tail):
    """Does the output end with the tokens before the word's last?"""
    for i in range(tail.size):
        if word[i + 1] == 0:
            return True
        if word[i + 1] != tail[i]:
            return False
    return True


@njit(error_model="numpy")
def _forbid(arguments, words_of_row, scores, ids, saved):
    """Bad words; `ids` and `saved` (bits of scores) are scratch. A row that would have nothing left keeps what it
    had."""
    slot, length = np.int64(words_of_row[BAD_WORDS_SLOT]), _word(arguments, BAD_WORD_LENGTH)
    size = _word(arguments, NUM_BAD_WORDS) * length
    entries = carray(int32_at(_word(arguments, BAD_WORDS) + 4 * size * slot), (size,))
    tail = carray(int32_at(_word(arguments, TAILS) + 4 * (length - 1) * slot), (length - 1,))
    count = 0
    for begin in range(0, size, length):
        token = entries[begin] - 1
        if token >= 0 and scores[token] > -_INF and _is_near(entries[begin : begin + length], tail):
            ids[count], saved[count] = token, bits_of_float(scores[token])
            scores[token] = -_INF
            count += 1
    for i in range(scores.size):
        if scores[i] > -_INF:
            return
    for i in range(count):
        scores[ids[i]] = float_of_bits(saved[i])


@njit(error_model="numpy")
def _process(arguments, index, words_of_row, position, logits, scores, words, ids, saved):
    """scores = logits after the processors, in the order of `sampling/sampler.py`."""
    flags = words_of_row[FLAGS]
    for i in range(scores.size):
        scores[i] = logits[i]
    if flags & FLAG_BIASED:
        _add_edits(arguments, words_of_row, scores, False)
    if flags & FLAG_WATERMARK:
        _add_watermark(arguments, words_of_row, scores, words)
    if flags & FLAG_PENALISED:
        _penalise(arguments, words_of_row, scores)
    if _word(arguments, ALLOWED) != 0:
        width = (scores.size + 31) // 32
        _mask(carray(int32_at(_word(arguments, ALLOWED) + 4 * width * index), (width,)), scores)
    if flags & FLAG_BAD_WORDS:
        _forbid(arguments, words_of_row, scores, ids, saved)
    is_early = flags & FLAG_BANNED and position < np.int64(words_of_row[BAN_UNTIL])
    if is_early and _has_other(scores, arguments, words_of_row):
        _add_edits(arguments, words_of_row, scores, True)


@njit(error_model="numpy")
def _best_block(values):
    """The best, the first of the blocks that have it, and the number of NaN."""
    best, best_block, broken = -_INF, 0, np.int32(0)
    for begin in range(0, values.size, 1024):
        other, other_broken = _best_of(values, begin, min(begin + 1024, values.size))
        broken += other_broken
        if other > best:
            best, best_block = other, begin
    return best, best_block, broken


@njit(error_model="numpy")
def _sample_row(arguments, scratch, index):
    vocab_size = _word(arguments, VOCAB_SIZE)
    raw = carray(float32_at(_word(arguments, LOGITS) + 4 * _word(arguments, ROW_STRIDE) * index), (vocab_size,))
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
    processed = carray(float32_at(lists + 16 * _BLOCK * num_blocks + 12 * _BLOCK), (vocab_size,))

    flags = np.int32(0)
    words_of_row = carray(int32_at(_word(arguments, TABLE)), (1,))
    if _word(arguments, ROWS) != 0:
        row = load_int64(_word(arguments, ROWS) + 8 * index)
        words_of_row = carray(int32_at(_word(arguments, TABLE) + 4 * NUM_WORDS * row), (NUM_WORDS,))
        flags = words_of_row[FLAGS]

    raw_best, best_block, broken = _best_block(raw)
    is_broken = broken > 0 or raw_best == _INF or raw_best == -_INF
    logits, best = raw, raw_best
    if not is_broken and (flags & FLAGS_PROCESSED != 0 or _word(arguments, ALLOWED) != 0):
        position = load_int64(_word(arguments, POSITIONS) + 8 * index)
        _process(arguments, index, words_of_row, position, raw, processed, words, ids, ranks)
        logits = processed
        best, best_block, broken = _best_block(logits)
        is_broken = broken > 0 or best == _INF or best == -_INF
    if is_broken:
        out_id[0], out_logprob[0], out_is_nan[0], out_normalizer[0] = 0, _NAN, 1, _NAN
        _show(arguments, index, logits, logits, ids, 0, vocab_size, True, False, best)
        return
    best_id = _find(logits, best_block, best)
    out_is_nan[0] = 0

    if flags & FLAG_SAMPLED == 0:
        if flags & FLAG_RAW:
            logits, best = raw, raw_best
        normalizer = _normalizer(logits, vocab_size, best)
        out_id[0], out_logprob[0], out_normalizer[0] = best_id, (logits[best_id] - best) - normalizer, normalizer
        _show(arguments, index, logits, logits, ids, 0, vocab_size, False, True, best)
        return

    position = np.uint64(load_int64(_word(arguments, POSITIONS) + 8 * index))
    seed = (np.uint64(words_of_row[SEED_HIGH]) << _HALF_WORD) | (np.uint64(words_of_row[SEED_LOW]) & _LOW)
    top_k = np.int64(words_of_row[TOP_K])
    top_p = float_of_bits(words_of_row[TOP_P])
    min_p = float_of_bits(words_of_row[MIN_P])
    typical_p = float_of_bits(words_of_row[TYPICAL_P])
    _scale(logits, vocab_size, best, float_of_bits(words_of_row[TEMPERATURE]), scores, block_ranks)
    is_cut = 0 < top_k < vocab_size or top_p < np.float32(1) or min_p > _ZERO or typical_p < np.float32(1)
    count = 0
    normalizer = _ZERO
    if is_cut:
        count, total = _keep(scores, vocab_size, block_ranks, top_k, top_p, min_p, typical_p, ids, ranks, masses)
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
        normalizer = _normalizer(raw, vocab_size, raw_best)
        out_logprob[0] = (raw[chosen] - raw_best) - normalizer
    else:
        out_logprob[0] = scores[chosen] - normalizer
    out_id[0], out_normalizer[0] = chosen, normalizer
    _show(arguments, index, raw, scores, ids, count, vocab_size, is_cut, flags & FLAG_RAW != 0, raw_best)


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
    return (4 * (_BLOCK + 1) * num_blocks + 20 * _BLOCK * num_blocks + 12 * _BLOCK + 127) // 64 * 64


def sample(
    logits: torch.Tensor,
    tables: RowTables,
    rows: torch.Tensor,
    positions: torch.Tensor,
    flags: int,
    allowed: torch.Tensor | None,
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
    if allowed is not None:
        allowed = allowed.contiguous()
        assert allowed.dtype == torch.int32, "masks are int32"
        assert allowed.shape == (n, -(-vocab_size // 32)), "a mask has a bit for each token"
    # Alone, raw logprobs change nothing for a greedy row.
    is_plain = not flags & ~FLAG_RAW and allowed is None
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
        0 if is_plain else rows.data_ptr(), positions.data_ptr(), tables.words.data_ptr(),
        tables.counts.data_ptr(), tables.edit_ids.data_ptr(), tables.edit_values.data_ptr(), tables.edit_ids.shape[1],
        tables.bad_words.data_ptr(), tables.bad_words.shape[1], tables.bad_words.shape[2], tables.tails.data_ptr(),
        tables.green_limit, int(np.float32(tables.green_delta).view(np.int32)),
        0 if allowed is None else allowed.data_ptr(),
        ids.data_ptr(), logprobs.data_ptr(), is_nan.data_ptr(),
        0 if shown is None else shown.data_ptr(), normalizers.data_ptr(),
        scratch.data_ptr(), stride,
    )  # fmt: skip
    run(sampling_worker(), words.ctypes.data, alone=n == 1, max_workers=scratch.numel() // stride)
    return ids, logprobs, is_nan, shown, normalizers


def warmup() -> None:
    """Compile, or read the code from numba's cache."""
    sampling_worker()
