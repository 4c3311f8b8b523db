"""Op sample: logits and packed parameters -> chosen ids. `sampling/sampler.py` says what is computed and composes it
from torch; that is the reference. Here is the kernel of a device that has one.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch

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
    FLAG_TYPICAL,
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

__all__ = [
    "BAD_WORDS_SLOT",
    "BAN_UNTIL",
    "COUNT_SLOT",
    "EDIT_SLOT",
    "FLAGS",
    "FLAGS_PROCESSED",
    "FLAG_BAD_WORDS",
    "FLAG_BANNED",
    "FLAG_BIASED",
    "FLAG_PENALISED",
    "FLAG_RAW",
    "FLAG_SAMPLED",
    "FLAG_TYPICAL",
    "FLAG_WATERMARK",
    "FREQUENCY",
    "IN_PROMPT",
    "LAST_ID",
    "MIN_P",
    "NUM_WORDS",
    "PRESENCE",
    "REPETITION",
    "SEED_HIGH",
    "SEED_LOW",
    "TEMPERATURE",
    "TOP_K",
    "TOP_P",
    "TYPICAL_P",
    "WATERMARK_DOMAIN",
    "WATERMARK_KEY",
    "RowTables",
    "SampleKernel",
    "sample_kernel",
]


class SampleKernel(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,  # [n, vocab] f32
        tables: RowTables,
        rows: torch.Tensor,  # [n] int64
        positions: torch.Tensor,  # [n] int64
        flags: int,  # what any of the rows uses
        allowed: torch.Tensor | None,  # [n, ceil(vocab / 32)] int32
        with_scores: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """ids [n] int64, logprobs [n] f32, is_nan [n] bool, scores [n, vocab] f32 or None, normalizers [n] f32. Where
        scores are wanted, score - normalizer is a token's logprob."""
        ...


def sample_kernel(device_type: str) -> SampleKernel | None:
    """The fused kernel for a device, compiled; None where there is none. Ask once, at start."""
    if device_type != "cpu" or importlib.util.find_spec("numba") is None:
        return None
    # Imported here: numba takes a second, which a GPU's start need not spend.
    from tgi.server.kernels.cpu import sampling

    sampling.warmup()
    return sampling.sample
