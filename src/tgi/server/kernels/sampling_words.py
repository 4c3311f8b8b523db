"""How a row's sampling parameters lie in memory, for every sampling kernel: sixteen 32-bit words a row, read by these
names, and tables beside them for the rows that need more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

(
    TEMPERATURE,  # this and the next six are float32 bits
    TOP_P,
    MIN_P,
    TYPICAL_P,
    REPETITION,
    FREQUENCY,
    PRESENCE,
    TOP_K,
    SEED_LOW,
    SEED_HIGH,
    FLAGS,
    COUNT_SLOT,  # row of RowTables.counts; 0: none
    EDIT_SLOT,  # row of RowTables.edit_ids and edit_values; 0: none
    BAN_UNTIL,  # position before which the row's banned ids may not be chosen
    LAST_ID,  # the row's last token; kept for rows with a watermark alone
    BAD_WORDS_SLOT,  # row of RowTables.bad_words and tails; 0: none
) = range(16)
NUM_WORDS = 16

FLAG_SAMPLED = 1  # else greedy
FLAG_RAW = 2  # logprobs before processors and warpers
FLAG_PENALISED = 4
FLAG_BIASED = 8
FLAG_BANNED = 16
FLAG_WATERMARK = 32
FLAG_TYPICAL = 64
FLAG_BAD_WORDS = 128
# Logits change before anything else.
FLAGS_PROCESSED = FLAG_PENALISED | FLAG_BIASED | FLAG_BANNED | FLAG_WATERMARK | FLAG_BAD_WORDS

# An entry of RowTables.counts: how often the row's output has the token, and this bit when its prompt has it.
IN_PROMPT = 1 << 30

WATERMARK_KEY = 15485863  # TGI's; times the last id it keys the words that draw a green list
WATERMARK_DOMAIN = 1  # fourth word of their counters; noise has 0


@dataclass(frozen=True, slots=True)
class RowTables:
    """Everything about rows that a choice reads. Slot 0 of a table is nobody's and neutral."""

    words: torch.Tensor  # [max_rows, NUM_WORDS] int32
    counts: torch.Tensor  # [slots, vocab] int32
    edit_ids: torch.Tensor  # [slots, width] int64; unused entries: id 0, value 0
    edit_values: torch.Tensor  # [slots, width] f32; -inf: a banned id
    # A token is written as id + 1. An entry: the word's last token, then those before it, newest first. 0 in place of
    # the last: no word; in place of another: any token, or none.
    bad_words: torch.Tensor  # [slots, words, length] int32
    tails: torch.Tensor  # [slots, length - 1] int32: the row's last outputs, as id + 1, newest first; 0: none yet
    green_limit: int  # a word below it makes its token green
    green_delta: float
