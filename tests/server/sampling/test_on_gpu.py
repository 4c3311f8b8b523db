"""The sampler on a CUDA device: the CPU's ids, the CPU's noise to the bit, and no wait for the device."""

from __future__ import annotations

import random

import pytest
import torch

from tests.server.sampling.requests import MIXED, logits_like_a_models
from tgi.server.sampling.noise import gumbel_noise
from tgi.server.sampling.sampler import sample
from tgi.server.sampling.state import SamplingState

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


def test_noise_has_the_same_bits():
    random.seed(4)
    seeds = torch.tensor([random.getrandbits(63) for _ in range(5)])
    positions = torch.arange(5) * 1_000_000_007
    here = gumbel_noise(seeds, positions, 50_001)
    there = gumbel_noise(seeds.cuda(), positions.cuda(), 50_001).cpu()
    assert torch.equal(here.view(torch.int32), there.view(torch.int32))


def test_ids_are_the_cpus_and_launching_never_waits():
    logits = logits_like_a_models(len(MIXED), 12_345)
    host = SamplingState(len(MIXED), 12_345, torch.device("cpu"))
    host.kernel = None
    device = torch.device("cuda")
    state = SamplingState(len(MIXED), 12_345, device)
    there_logits, rows = logits.to(device), torch.arange(len(MIXED), device=device)
    for mode in ("default", "error"):  # the first round may load kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for row, sampling in enumerate(MIXED):
                state.remove(row)
                state.add(row, sampling)
            greedy = sample(there_logits, rows, rows + 10, state, True, top_n=3)
            there = sample(there_logits, rows, rows + 10, state, False, top_n=3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for row, sampling in enumerate(MIXED):
        host.add(row, sampling)
    here = sample(logits, rows.cpu(), rows.cpu() + 10, host, False, top_n=3)
    assert torch.equal(there.ids.cpu(), here.ids)
    assert torch.equal(greedy.ids.cpu(), logits.argmax(-1))
    torch.testing.assert_close(there.logprobs.cpu(), here.logprobs, atol=3e-6, rtol=1e-6)
