"""Rows of every kind, and logits of the shape that models give, for the tests of the sampler."""

from __future__ import annotations

import numpy as np
import torch

from tgi.server.sampling.sampler import SampleOutput, sample
from tgi.server.sampling.state import SamplingState
from tgi.shard_client.messages import Sampling


def logits_like_a_models(n: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocab_size, generator=generator) * 2.5
    return logits + (torch.rand(n, vocab_size, generator=generator) < 3e-3) * 9.0


def choose(
    state: SamplingState,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    top_n: int = 0,
    allowed: torch.Tensor | None = None,
    commits: bool = False,
) -> SampleOutput:
    """As a step does it: host rows say which kind it is."""
    flags = state.flags(rows.cpu().numpy(), positions.cpu().numpy())
    output = sample(logits, rows, positions, state, flags, top_n, allowed)
    if commits:
        state.commit(rows, output.ids, flags)
    return output


MIXED = [
    Sampling(),
    Sampling(do_sample=True, seed=1),
    Sampling(do_sample=True, seed=2, temperature=0.6),
    Sampling(do_sample=True, seed=3, temperature=1.9, top_k=40),
    Sampling(do_sample=True, seed=4, top_p=0.9),
    Sampling(do_sample=True, seed=5, temperature=0.7, top_k=50, top_p=0.95, raw_logprobs=True),
    Sampling(do_sample=True, seed=2**64 - 1, min_p=0.05),
    Sampling(raw_logprobs=True, seed=9),
    Sampling(do_sample=True, seed=6, temperature=3.0, top_p=0.99, min_p=0.001),
    Sampling(do_sample=True, seed=7, temperature=1e-4),
    Sampling(do_sample=True, seed=8, top_k=900, top_p=0.999),
    Sampling(do_sample=True, seed=9, top_k=2**40),
]

# Every processor and warper, alone and together, for rows with the history below.
CONTROLS = [
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.7, raw_logprobs=True),
    Sampling(frequency_penalty=1.5),
    Sampling(presence_penalty=-2.0, raw_logprobs=True),
    Sampling(logit_bias=((3, 40.0), (0, -100.0), (4, 1.5))),
    Sampling(watermark=True),
    Sampling(do_sample=True, seed=11, repetition_penalty=1.2, top_p=0.9),
    Sampling(do_sample=True, seed=12, frequency_penalty=2.0, presence_penalty=1.0, top_k=20, raw_logprobs=True),
    Sampling(do_sample=True, seed=13, logit_bias=tuple((token, 0.5 * token - 1.0) for token in range(5)), min_p=0.02),
    Sampling(do_sample=True, seed=14, watermark=True, temperature=0.8),
    Sampling(do_sample=True, seed=15, typical_p=0.5),
    Sampling(do_sample=True, seed=16, typical_p=0.95, temperature=1.7, raw_logprobs=True),
    Sampling(do_sample=True, seed=17, typical_p=0.3, top_k=30),
    Sampling(do_sample=True, seed=18, typical_p=0.8, top_p=0.7, min_p=0.01),
    Sampling(
        do_sample=True,
        seed=19,
        temperature=0.9,
        top_k=60,
        top_p=0.95,
        min_p=0.001,
        typical_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias=((1, 3.0), (2, -3.0)),
        watermark=True,
    ),
    # Words of one token, of two that the row's output ends with, of two that it does not end with, and of many.
    Sampling(bad_words=((4,), (3, 1)), raw_logprobs=True),
    Sampling(do_sample=True, seed=20, bad_words=((2,), (3, 1), tuple(range(5)) * 4), top_p=0.9),
    *MIXED[:3],
]


def history(row: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompt of a row and what it has generated, with repeats; they share tokens."""
    generator = np.random.default_rng(row)
    few = min(vocab_size, 40)
    return generator.integers(0, few, 30).astype(np.uint32), generator.integers(0, few, row % 7 * 5).astype(np.uint32)


def make_state(
    samplings: list[Sampling], vocab_size: int, path: str = "fused", device: str = "cpu", ban: tuple[int, ...] = ()
) -> SamplingState:
    """Rows in the order of `samplings`, with their histories. `ban`: ids no row may choose before position 1000."""
    state = SamplingState(len(samplings), vocab_size, torch.device(device))
    if path == "composed":
        state.kernel = None
    for row, sampling in enumerate(samplings):
        state.add(row, sampling, *history(row, vocab_size), 1000, ban)
    return state


def masks(n: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """[n, ceil(vocab / 32)] int32: about half of the tokens are allowed; every third row has no mask."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.randint(-(2**31), 2**31, (n, -(-vocab_size // 32)), generator=generator, dtype=torch.int64)
    allowed[::3] = -1
    return allowed.to(torch.int32)
