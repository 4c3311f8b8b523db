"""Rows of every kind, and logits of the shape that models give, for the tests of the sampler."""

from __future__ import annotations

import torch

from tgi.shard_client.messages import Sampling


def logits_like_a_models(n: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocab_size, generator=generator) * 2.5
    return logits + (torch.rand(n, vocab_size, generator=generator) < 3e-3) * 9.0


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
