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
    _SPARE,
) = range(16)
NUM_WORDS = 16

FLAG_SAMPLED = 1  # else greedy
FLAG_RAW = 2  # logprobs before processors and warpers
FLAG_PENALISED = 4
FLAG_BIASED = 8
FLAG_BANNED = 16
FLAG_WATERMARK = 32
FLAG_TYPICAL = 64
FLAGS_PROCESSED = FLAG_PENALISED | FLAG_BIASED | FLAG_BANNED | FLAG_WATERMARK  # logits change before anything else

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
    green_limit: int  # a word below it makes its token green
    green_delta: float
