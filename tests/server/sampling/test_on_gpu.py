"""The sampler on a CUDA device: the CPU's ids, the CPU's noise to the bit, and no wait for the device."""

from __future__ import annotations

import random

import pytest
import torch

from tests.server.sampling.requests import CONTROLS, MIXED, choose, history, logits_like_a_models, make_state, masks
from tgi.server.ops.sampling import COUNT_SLOT
from tgi.server.sampling.noise import gumbel_noise
from tgi.server.sampling.sampler import sample
from tgi.server.sampling.state import SamplingState

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

VOCAB_SIZE = 12_345


def test_noise_has_the_same_bits():
    random.seed(4)
    seeds = torch.tensor([random.getrandbits(63) for _ in range(5)])
    positions = torch.arange(5) * 1_000_000_007
    here = gumbel_noise(seeds, positions, 50_001)
    there = gumbel_noise(seeds.cuda(), positions.cuda(), 50_001).cpu()
    assert torch.equal(here.view(torch.int32), there.view(torch.int32))


def counts_of(state: SamplingState, row: int) -> torch.Tensor:
    return state.tables.counts[state.table[row, COUNT_SLOT].item()].cpu()


@pytest.mark.parametrize("samplings", [MIXED, CONTROLS], ids=["warpers", "all controls"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["free", "masked and banned"])
def test_ids_are_the_cpus_over_steps_and_launching_never_waits(samplings, is_masked):
    ban = (1, 7) if is_masked else ()
    host = make_state(samplings, VOCAB_SIZE, "composed", ban=ban)
    device = torch.device("cuda")
    state = make_state(samplings, VOCAB_SIZE, "composed", "cuda", ban=ban)
    rows, host_rows = torch.arange(len(samplings), device=device), torch.arange(len(samplings))
    allowed = masks(len(samplings), VOCAB_SIZE) if is_masked else None
    there_allowed = None if allowed is None else allowed.to(device)
    positions = host_rows + 60
    flags = state.flags(host_rows.numpy(), positions.numpy())
    logits = [logits_like_a_models(len(samplings), VOCAB_SIZE, seed=step) for step in range(3)]
    there_logits = [one.to(device) for one in logits]
    there_positions = positions.to(device)
    for mode in ("default", "error"):  # the first round may load kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for row, sampling in enumerate(samplings):
                state.remove(row)
                state.add(row, sampling, *history(row, VOCAB_SIZE), 1000, ban)
            greedy = sample(there_logits[0], rows, there_positions, state, 0, top_n=3)
            there = []
            for one in there_logits:
                there.append(sample(one, rows, there_positions, state, flags, 3, there_allowed))
                state.commit(rows, there[-1].ids, flags)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(greedy.ids.cpu(), logits[0].argmax(-1))
    for step, output in enumerate(there):
        here = choose(host, logits[step], host_rows, positions, 3, allowed, commits=True)
        assert torch.equal(output.ids.cpu(), here.ids)
        torch.testing.assert_close(output.logprobs.cpu(), here.logprobs, atol=5e-6, rtol=1e-6)
    for row in host_rows[host.table[:, COUNT_SLOT] > 0].tolist():
        assert torch.equal(counts_of(state, row), counts_of(host, row))
