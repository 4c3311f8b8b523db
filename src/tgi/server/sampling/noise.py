"""Counter-based noise: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by
seed, position and token id. It has no state: a request gets the same noise in every batch and on every device.

key = (seed low, seed high), counter = (position low, position high, id // 4, domain); word id % 4 is the token's. Each
use of such words has a domain of its own; the noise has 0.
"""

from __future__ import annotations

import torch

from tgi.server.ops.exact_math import exact_gumbel

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four u32 words of counter and two of key, in broadcastable int64 tensors -> four u32 words in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product may pass 2^63: int64 wraps, and masking restores the upper word.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ k0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def token_words(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, domain: int = 0) -> torch.Tensor:
    """seeds [n] int64 (the bits of a u64), positions [n] int64 -> the token's word, u32 in int64 [n, vocab_size]."""
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    quads = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    counter = (positions & _LOW, (positions >> 32) & _LOW, quads, torch.full_like(quads, domain))
    words = philox(counter, (seeds & _LOW, (seeds >> 32) & _LOW))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocab_size]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise float32 [n, vocab_size]: argmax(logits + noise) is a draw from softmax(logits)."""
    return exact_gumbel(token_words(seeds, positions, vocab_size))
