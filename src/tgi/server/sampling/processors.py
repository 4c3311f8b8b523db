"""What changes a row's logits before anything is chosen: logit bias, watermark, penalties, the grammar's mask, bad
words and ids banned for now. Plain torch, never waits for the device; `sampler` says in which order and why.
"""

from __future__ import annotations

import torch

from tgi.server.ops.sampling import (
    BAD_WORDS_SLOT,
    BAN_UNTIL,
    COUNT_SLOT,
    EDIT_SLOT,
    FLAG_BAD_WORDS,
    FLAG_BANNED,
    FLAG_BIASED,
    FLAG_PENALISED,
    FLAG_WATERMARK,
    FLAGS,
    FREQUENCY,
    IN_PROMPT,
    LAST_ID,
    PRESENCE,
    REPETITION,
    WATERMARK_DOMAIN,
    WATERMARK_KEY,
    RowTables,
)
from tgi.server.sampling.noise import token_words

_INF = float("inf")


def process(
    logits: torch.Tensor,  # [n, vocab] f32
    words: torch.Tensor,  # [n, NUM_WORDS] int32
    positions: torch.Tensor,  # [n] int64
    tables: RowTables,
    flags: int,  # what any of the rows uses; the others' parameters are neutral
    allowed: torch.Tensor | None,  # [n, ceil(vocab / 32)] int32
) -> torch.Tensor:
    """New logits [n, vocab]; those given stay as they are."""
    reals = words.view(torch.float32)
    scores = logits
    if flags & FLAG_BIASED:
        ids, values = _edits(words, tables)
        scores = scores.scatter_add(1, ids, values.masked_fill(values == -_INF, 0.0))
    if flags & FLAG_WATERMARK:
        marked = (words[:, FLAGS] & FLAG_WATERMARK).bool().unsqueeze(1)
        green = green_list(words[:, LAST_ID].long(), logits.shape[1], tables.green_limit)
        scores = torch.where(marked & green, scores + tables.green_delta, scores)
    if flags & FLAG_PENALISED:
        counts = tables.counts[words[:, COUNT_SLOT].long()]
        columns = (reals[:, word].unsqueeze(1) for word in (REPETITION, FREQUENCY, PRESENCE))
        scores = penalise(scores, counts, *columns)
    if allowed is not None:
        scores = scores.masked_fill(~unpack(allowed, logits.shape[1]), -_INF)
    if flags & FLAG_BAD_WORDS:
        scores = _forbid(scores, words, tables)
    if flags & FLAG_BANNED:
        scores = _ban(scores, words, positions, tables)
    return scores


def penalise(
    scores: torch.Tensor,  # [n, vocab] f32
    counts: torch.Tensor,  # [n, vocab] int32, as RowTables.counts
    repetition: torch.Tensor,  # [n, 1] f32; 1: off
    frequency: torch.Tensor,  # [n, 1] f32; 0: off
    presence: torch.Tensor,  # [n, 1] f32; 0: off
) -> torch.Tensor:
    """Repetition (Keskar et al., CTRL, 2019) over prompt and output; frequency and presence, by OpenAI's formula, over
    the output alone."""
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(counts != 0, repeated, scores)
    counts = counts & (IN_PROMPT - 1)
    return scores - (counts * frequency + torch.where(counts > 0, presence, 0.0))


def green_list(last_ids: torch.Tensor, vocab_size: int, limit: int) -> torch.Tensor:
    """last_ids [n] int64 -> which tokens follow in green, bool [n, vocab_size]: limit / 2^32 of them (Kirchenbauer et
    al., "A watermark for large language models", 2023). Drawn by keyed words, so every device has the same list."""
    words = token_words(last_ids * WATERMARK_KEY, torch.zeros_like(last_ids), vocab_size, WATERMARK_DOMAIN)
    return words < limit


def unpack(allowed: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[n, words] int32 -> bool [n, vocab_size]: bit i % 32 of word i // 32 is token i's."""
    bits = (allowed.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=allowed.device)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def _edits(words: torch.Tensor, tables: RowTables) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 and values f32, both [n, width]. An id stands at most once among those of a value that is not 0."""
    slots = words[:, EDIT_SLOT].long()
    return tables.edit_ids[slots], tables.edit_values[slots]


def _forbid(scores: torch.Tensor, words: torch.Tensor, tables: RowTables) -> torch.Tensor:
    """The last token of each bad word whose other tokens the row's output ends with."""
    slots = words[:, BAD_WORDS_SLOT].long()
    entries, tails = tables.bad_words[slots], tables.tails[slots].unsqueeze(1)
    lasts, before = entries[..., 0].long(), entries[..., 1:]
    is_near = ((before == tails) | (before == 0)).all(-1) & (lasts > 0)
    return _unless_all(scores, scores.scatter_add(1, (lasts - 1).clamp(min=0), torch.where(is_near, -_INF, 0.0)))


def _ban(scores: torch.Tensor, words: torch.Tensor, positions: torch.Tensor, tables: RowTables) -> torch.Tensor:
    """A grammar that has come to its end may end."""
    ids, values = _edits(words, tables)
    early = (positions < words[:, BAN_UNTIL]).unsqueeze(1)
    return _unless_all(scores, scores.scatter_add(1, ids, torch.where(early & (values == -_INF), values, 0.0)))


def _unless_all(scores: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """A row that would have nothing left keeps what it had."""
    return torch.where(banned.amax(-1, keepdim=True) > -_INF, banned, scores)
