"""Noise against published vectors, a plain Philox, and itself on every path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numba import njit

from tests.server.sampling import plain
from tgi.server.kernels.cpu import exact_math as compiled
from tgi.server.kernels.cpu import sampling as kernel
from tgi.server.ops.exact_math import exact_exp, exact_gumbel, exact_log
from tgi.server.sampling.noise import gumbel_noise, philox, token_words

LOW = 0xFFFFFFFF


def by_torch(counter: list[int], key: list[int]) -> list[int]:
    one = [torch.tensor([word]) for word in (*counter, *key)]
    return [int(word) for word in philox((one[0], one[1], one[2], one[3]), (one[4], one[5]))]


# Known-answer vectors of Random123, philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([LOW] * 4, [LOW] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, words):
    assert by_torch(counter, key) == words
    assert plain.philox(counter, key) == words


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63 - 1, -1, -(2**63), 0x1234_5678_9ABC_DEF0])
@pytest.mark.parametrize("position", [0, 5, 2**32 + 7])
def test_words_of_tokens_on_both_paths(seed, position):
    vocab_size = 27  # not a multiple of 4
    expected = []
    for token in range(vocab_size):
        counter = [position & LOW, position >> 32, token // 4, 0]
        expected.append(plain.philox(counter, [seed & LOW, (seed >> 32) & LOW])[token % 4])
    assert token_words(torch.tensor([seed]), torch.tensor([position]), vocab_size)[0].tolist() == expected
    words = np.zeros(28, np.int64)
    kernel._philox(np.uint64(position), np.uint64(seed & (2**64 - 1)), np.uint64(0), 0, 7, words)
    assert words[:vocab_size].tolist() == expected


@njit(error_model="numpy")
def _compiled_gumbel(words, out):
    for i in range(words.size):
        out[i] = compiled.exact_gumbel(words[i])


@njit(error_model="numpy")
def _compiled_exp(values, out):
    for i in range(values.size):
        out[i] = compiled.exact_exp(values[i])


EDGES = [0, 1, 255, 256, 511, 2**31 - 1, 2**31, 2**31 + 256, 0xB504F300, 0xB504F400, 0xFFFFFE00, 0xFFFFFF00, LOW]


def some_words() -> torch.Tensor:
    return torch.cat(
        [torch.tensor(EDGES), torch.randint(0, 2**32, (200_003,), generator=torch.Generator().manual_seed(1))]
    )


def test_gumbel_has_the_same_bits_compiled_and_composed():
    words = some_words()
    out = np.empty(len(words), np.float32)
    _compiled_gumbel(words.numpy(), out)
    assert (out.view(np.int32) == exact_gumbel(words).numpy().view(np.int32)).all()


def test_exp_has_the_same_bits_compiled_and_composed():
    values = torch.cat([torch.tensor([0.0, -0.0, -87.0, -87.1, -1e30, -math.inf]), -torch.rand(100_003) * 90])
    out = np.empty(len(values), np.float32)
    _compiled_exp(values.numpy(), out)
    assert (out.view(np.int32) == exact_exp(values).numpy().view(np.int32)).all()


def test_exact_functions_are_accurate():
    words = some_words()
    uniform = ((words >> 8).double() + 0.5) / 2**24
    torch.testing.assert_close(exact_gumbel(words).double(), -torch.log(-torch.log(uniform)), atol=1e-6, rtol=1e-6)
    values = -torch.rand(100_000, generator=torch.Generator().manual_seed(2)) * 87
    torch.testing.assert_close(exact_exp(values).double(), torch.exp(values.double()), atol=0, rtol=2e-7)
    values = torch.exp(torch.randn(100_000, generator=torch.Generator().manual_seed(3)) * 10)
    torch.testing.assert_close(exact_log(values).double(), torch.log(values.double()), atol=2e-7, rtol=2e-7)
    assert exact_exp(torch.zeros(1)).item() == 1.0
    assert exact_exp(torch.tensor([-87.5, -math.inf, math.nan])).tolist() == [0.0, 0.0, 0.0]
    assert exact_gumbel(torch.tensor([LOW])).item() <= float(kernel._MAX_NOISE)


def test_noise_depends_on_seed_and_position_and_on_nothing_else():
    seeds, positions = torch.tensor([7, 7, 8, 7]), torch.tensor([3, 4, 3, 3])
    noise = gumbel_noise(seeds, positions, 1000)
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(noise[0], gumbel_noise(seeds[:1], positions[:1], 1000)[0])
    assert torch.equal(noise[0, :10], gumbel_noise(seeds[:1], positions[:1], 10)[0])
    assert (noise[0] != noise[1]).float().mean() > 0.99
    assert (noise[0] != noise[2]).float().mean() > 0.99


def test_noise_is_gumbel():
    noise = gumbel_noise(torch.arange(8), torch.arange(8), 25_000).double().flatten().sort().values
    cumulative = torch.exp(-torch.exp(-noise))
    steps = torch.arange(1, len(noise) + 1, dtype=torch.float64) / len(noise)
    assert (cumulative - steps).abs().max() < 1.95 / math.sqrt(len(noise))  # Kolmogorov-Smirnov, 0.1 %
