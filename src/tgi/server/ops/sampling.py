"""Op sample: logits and packed parameters -> chosen ids. `sampling/sampler.py` says what is computed and composes it
from torch; that is the reference. Here is the kernel of a device that has one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

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

__all__ = [
    "FLAGS",
    "FLAG_RAW",
    "FLAG_SAMPLED",
    "MIN_P",
    "NUM_WORDS",
    "SEED_HIGH",
    "SEED_LOW",
    "TEMPERATURE",
    "TOP_K",
    "TOP_P",
    "SampleKernel",
    "sample_kernel",
]

# Takes logits [n, vocab] f32, table [max_rows, NUM_WORDS] int32, rows [n] int64, positions [n] int64, greedy_only,
# with_scores; gives ids [n] int64, logprobs [n] f32, is_nan [n] bool, scores [n, vocab] f32 or None, normalizers [n]
# f32. Where scores are wanted, score - normalizer is a token's logprob.
SampleKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, bool],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
]


def sample_kernel(device_type: str) -> SampleKernel | None:
    """The fused kernel for a device, compiled; None where there is none. Ask once, at start."""
    if device_type != "cpu" or importlib.util.find_spec("numba") is None:
        return None
    # Imported here: numba takes a second, which a GPU's start need not spend.
    from tgi.server.kernels.cpu import sampling

    sampling.warmup()
    return sampling.sample
