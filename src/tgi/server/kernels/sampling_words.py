"""How a row's sampling parameters are packed: eight 32-bit words, which every sampling kernel reads by these names."""

from __future__ import annotations

TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED_LOW, SEED_HIGH, FLAGS, _SPARE = range(8)  # the first three are float32 bits
NUM_WORDS = 8

FLAG_SAMPLED = 1  # else greedy
FLAG_RAW = 2  # logprobs before processors and warpers
