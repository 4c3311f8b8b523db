"""The sampler on both paths: fused for the CPU, and composed from torch."""

from __future__ import annotations

import math

import pytest
import torch

from tests.server.sampling.requests import MIXED, choose, logits_like_a_models
from tgi.server.sampling.sampler import SampleOutput
from tgi.server.sampling.state import SamplingState
from tgi.shard_client.messages import Sampling

CPU = torch.device("cpu")
PATHS = ["fused", "composed"]


def make_state(samplings: list[Sampling], vocab_size: int, path: str = "fused") -> SamplingState:
    state = SamplingState(len(samplings), vocab_size, CPU)
    assert state.kernel is not None, "numba is installed wherever the tests run"
    if path == "composed":
        state.kernel = None
    for row, sampling in enumerate(samplings):
        state.add(row, sampling)
    return state


def run(logits, samplings, positions=None, path="fused", top_n=0) -> SampleOutput:
    state = make_state(samplings, logits.shape[1], path)
    rows = torch.arange(len(samplings))
    if positions is None:
        positions = torch.arange(len(samplings)) + 10
    return choose(state, logits, rows, positions, top_n)


@pytest.mark.parametrize("vocab_size", [5, 64, 1003, 12_345])
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "flat", "banned"])
def test_both_paths_choose_the_same(vocab_size, kind):
    logits = logits_like_a_models(len(MIXED), vocab_size, seed=vocab_size)
    if kind == "bfloat16":
        logits = logits.bfloat16().float()
    if kind == "flat":
        logits = torch.zeros_like(logits)
    if kind == "banned":
        logits[:, 1::2] = float("-inf")
    for position in (0, 10, 2**33):
        positions = torch.arange(len(MIXED)) + position
        fused, composed = (run(logits, MIXED, positions, path, top_n=4) for path in PATHS)
        assert torch.equal(fused.ids, composed.ids)
        assert not fused.is_nan.any()
        assert not composed.is_nan.any()
        torch.testing.assert_close(fused.logprobs, composed.logprobs, atol=3e-6, rtol=1e-6)
        assert fused.top_logprobs is not None
        assert composed.top_logprobs is not None
        torch.testing.assert_close(fused.top_logprobs, composed.top_logprobs, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_greedy_takes_the_first_of_the_best_and_its_logprob(path):
    logits = torch.zeros(2, 300)
    logits[0, [70, 200]] = 4.0
    logits[1, 299] = 1.0
    output = run(logits, [Sampling(), Sampling()], path=path)
    assert output.ids.tolist() == [70, 299]
    torch.testing.assert_close(output.logprobs, torch.log_softmax(logits, -1).gather(1, output.ids[:, None])[:, 0])
    assert output.top_ids is None
    assert output.top_logprobs is None


@pytest.mark.parametrize("path", PATHS)
def test_greedy_rows_are_the_same_beside_sampled_ones(path):
    logits = logits_like_a_models(2, 1003)
    alone = run(logits[:1], [Sampling()], path=path)
    beside = run(logits, [Sampling(), Sampling(do_sample=True)], path=path)
    assert beside.ids[0] == alone.ids[0]
    torch.testing.assert_close(beside.logprobs[0], alone.logprobs[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.row("E: Sampling and seed semantics")
def test_a_choice_depends_on_seed_position_and_logits_alone(path):
    vocab_size = 1003
    logits = logits_like_a_models(len(MIXED), vocab_size, seed=3)
    together = run(logits, MIXED, path=path)
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(4))
    state = make_state(MIXED, vocab_size, path)
    shuffled = choose(state, logits[order], order, order + 10)
    assert torch.equal(shuffled.ids, together.ids[order])
    for row, sampling in enumerate(MIXED):
        # Alone, in another row, after another request has had the row.
        state = SamplingState(40, vocab_size, CPU)
        if path == "composed":
            state.kernel = None
        state.add(33, Sampling(do_sample=True, seed=99, top_k=2))
        state.remove(33)
        state.add(33, sampling)
        alone = choose(state, logits[row : row + 1], torch.tensor([33]), torch.tensor([row + 10]))
        assert alone.ids[0] == together.ids[row]


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_raw_and_warped(path):
    logits = logits_like_a_models(2, 500)
    warpers = {"do_sample": True, "seed": 5, "temperature": 0.5, "top_k": 3}
    output = run(logits, [Sampling(**warpers), Sampling(**warpers, raw_logprobs=True)], path=path, top_n=5)
    warped = logits[0] / 0.5
    warped = warped.masked_fill(warped < warped.topk(3).values[-1], float("-inf"))
    torch.testing.assert_close(output.logprobs[0], torch.log_softmax(warped, -1)[output.ids[0]])
    torch.testing.assert_close(output.logprobs[1], torch.log_softmax(logits[1], -1)[output.ids[1]])
    assert output.top_logprobs is not None
    assert output.top_ids is not None
    torch.testing.assert_close(output.top_logprobs[0, :3], torch.log_softmax(warped, -1).topk(3).values)
    assert output.top_logprobs[0, 3:].tolist() == [-math.inf] * 10
    torch.testing.assert_close(output.top_logprobs[1, :5], torch.log_softmax(logits[1], -1).topk(5).values)
    assert output.top_ids[1, :5].tolist() == logits[1].topk(5).indices.tolist()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_broken_row_is_marked_and_harms_nobody(path, do_sample):
    logits = logits_like_a_models(6, 300)
    samplings = [Sampling(do_sample=do_sample, seed=row, top_p=0.9) for row in range(6)]
    whole = run(logits, samplings, path=path, top_n=2)
    logits[0, 7] = float("nan")
    logits[1, :] = float("nan")
    logits[2, 299] = float("inf")
    logits[3, :] = float("-inf")  # nothing possible
    logits[4, 1:] = float("-inf")  # one token possible
    output = run(logits, samplings, path=path, top_n=2)
    assert output.is_nan.tolist() == [True, True, True, True, False, False]
    assert output.ids[:5].tolist() == [0, 0, 0, 0, 0]
    assert output.logprobs[4] == 0.0
    assert output.ids[5] == whole.ids[5]
    assert output.logprobs[5] == whole.logprobs[5]


@pytest.mark.parametrize("path", PATHS)
def test_a_banned_token_is_never_chosen(path):
    logits = torch.zeros(64, 8)
    logits[:, [0, 3, 7]] = float("-inf")
    output = run(logits, [Sampling(do_sample=True, seed=row, temperature=100.0) for row in range(64)], path=path)
    assert set(output.ids.tolist()) == {1, 2, 4, 5, 6}


# Upper 0.1 % points of chi-square for the degrees of freedom that occur.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 11: 31.26}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "warpers",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9},
        {"min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_warped_distribution(path, warpers):
    """Chi-square over fixed seeds and positions: a draw of each, so that neither repeats the other's noise."""
    draws, vocab_size = 4000, 12
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(6)) * 1.5
    samplings = [Sampling(do_sample=True, seed=seed * 0x9E3779B97F4A7C15 % 2**64, **warpers) for seed in range(draws)]
    output = run(row.expand(draws, -1).contiguous(), samplings, torch.arange(draws) % 50, path)

    scores = row / warpers.get("temperature", 1.0)
    if top_k := warpers.get("top_k"):
        scores[scores < scores.topk(top_k).values[-1]] = float("-inf")
    if top_p := warpers.get("top_p"):
        order = scores.argsort(descending=True)
        mass = torch.softmax(scores, 0)[order]
        scores[order[mass.cumsum(0) - mass >= top_p]] = float("-inf")
    if min_p := warpers.get("min_p"):
        probabilities = torch.softmax(scores, 0)
        scores[probabilities < min_p * probabilities.max()] = float("-inf")
    expected = torch.softmax(scores.double(), 0) * draws
    counts = torch.bincount(output.ids, minlength=vocab_size).double()
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert statistic < CHI_SQUARE[int(possible.sum()) - 1]


@pytest.mark.parametrize("path", PATHS)
def test_logits_with_other_strides(path):
    wide = logits_like_a_models(4, 2006)
    samplings = MIXED[:4]
    expected = run(wide[:, :1003].contiguous(), samplings, path=path)
    for logits in (wide[:, :1003], wide[:, :1003].t().contiguous().t()):
        assert torch.equal(run(logits, samplings, path=path).ids, expected.ids)


def test_the_fused_kernel_does_not_mind_the_number_of_threads(monkeypatch):
    from tgi.server.kernels.cpu import parallel

    logits = logits_like_a_models(len(MIXED), 12_345)
    shared = run(logits, MIXED)
    monkeypatch.setattr(parallel, "_gomp_parallel", None)
    alone = run(logits, MIXED)
    assert torch.equal(alone.ids, shared.ids)
    assert torch.equal(alone.logprobs, shared.logprobs)


@pytest.mark.fault("vllm#1211")
def test_requests_with_other_seeds_do_not_repeat_each_other():
    logits = torch.zeros(32, 1000)
    output = run(logits, [Sampling(do_sample=True, seed=seed) for seed in range(32)], torch.full((32,), 5))
    assert len(set(output.ids.tolist())) > 28
