"""Random mixtures of all controls, in batches of unlike rows, against a plain sampler that knows one row and the order
of its steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.server.sampling.plain import is_green, log_softmax, noisy, processed, warped
from tests.server.sampling.requests import choose, logits_like_a_models
from tgi.server.sampling.processors import green_list
from tgi.server.sampling.state import SamplingState
from tgi.shard_client.messages import Sampling

PATHS = ["fused", "composed"]
ROUNDS = 60


def some_sampling(rng: random.Random, vocab_size: int) -> Sampling:
    """Each control with some chance; tokens are few, so that controls meet on them."""

    def maybe(neutral: Any, *values: Any) -> Any:
        return rng.choice(values) if rng.random() < 0.4 else neutral

    few = min(vocab_size, 6)
    return Sampling(
        do_sample=rng.random() < 0.75,
        seed=rng.getrandbits(64),
        temperature=maybe(1.0, 1e-4, 0.3, 0.7, 1.5, 5.0),
        top_k=maybe(0, 1, 2, 5, 30, vocab_size, vocab_size + 5, 2**40),
        top_p=maybe(1.0, 1e-30, 0.1, 0.5, 0.9, 0.999),
        min_p=maybe(0.0, 1e-4, 0.05, 0.3, 1.0),
        typical_p=maybe(1.0, 1e-30, 0.2, 0.5, 0.9),
        repetition_penalty=maybe(1.0, 0.5, 1.2, 3.0),
        frequency_penalty=maybe(0.0, -2.0, 0.5, 2.0),
        presence_penalty=maybe(0.0, -2.0, 0.4, 2.0),
        watermark=maybe(False, True),
        logit_bias=tuple(
            (t, rng.choice([-100.0, -3.0, 1.0, 5.0])) for t in rng.sample(range(few), rng.randint(0, few))
        ),
        bad_words=maybe((), some_words(rng, few)),
        raw_logprobs=maybe(False, True),
    )


def some_words(rng: random.Random, few: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rng.choices(range(few), k=rng.randint(1, 3))) for _ in range(rng.randint(1, 5)))


def some_mask(rng: random.Random, n: int, vocab_size: int) -> tuple[torch.Tensor | None, np.ndarray | None]:
    allowed = np.array([[rng.random() < 0.5 for _ in range(vocab_size)] for _ in range(n)])
    if rng.random() < 0.7 or not allowed.any(1).all():
        return None, None
    bits = np.zeros((n, -(-vocab_size // 32) * 32), np.uint8)
    bits[:, :vocab_size] = allowed
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)), allowed


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", [1, 2])
def test_mixtures_follow_the_order_of_the_steps(path: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        vocab_size, n = rng.choice([7, 33, 64, 65, 129]), rng.randint(1, 7)
        logits = logits_like_a_models(n, vocab_size, rng.getrandbits(30)) * rng.choice([0.2, 1.0, 3.0])
        mask, allowed = some_mask(rng, n, vocab_size)
        banned = rng.sample(range(vocab_size), rng.randint(0, 3))
        until = rng.choice([0, 21, 1000])
        gamma, delta = rng.choice([(0.5, 2.0), (0.25, 4.0), (0.9, -1.0)])
        state = SamplingState(n + 2, vocab_size, torch.device("cpu"), gamma, delta)
        if path == "composed":
            state.kernel = None
        samplings = [some_sampling(rng, vocab_size) for _ in range(n)]
        few = min(vocab_size, 8)
        pasts = [(rng.choices(range(few), k=rng.randint(1, 9)), rng.choices(range(few), k=index)) for index in range(n)]
        rows = torch.tensor(rng.sample(range(n + 2), n))
        for row, sampling, (prompt, generated) in zip(rows.tolist(), samplings, pasts):
            state.add(row, sampling, np.array(prompt, np.uint32), np.array(generated, np.uint32), until, banned)
        positions = [20 + rng.choice([0, 5, 2**33]) for _ in range(n)]
        output = choose(state, logits, rows, torch.tensor(positions), vocab_size, mask)
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        shown = torch.empty(n, vocab_size).scatter_(1, output.top_ids, output.top_logprobs)
        for index, (sampling, (prompt, generated)) in enumerate(zip(samplings, pasts)):
            row_allowed = None if allowed is None else allowed[index]
            scores = processed(
                logits[index].numpy(),
                sampling,
                prompt,
                generated,
                row_allowed,
                banned if positions[index] < until else (),
                gamma,
                delta,
            )
            token, values = int(output.ids[index]), scores
            if sampling.do_sample:
                scores = warped(scores, sampling)
                values = noisy(scores, sampling.seed, positions[index])
            # float32 may take another one than float64 where both are as good.
            assert values[token] == pytest.approx(values.max(), rel=1e-4, abs=1e-4), sampling
            expected = log_softmax(logits[index].double().numpy() if sampling.raw_logprobs else scores)
            np.testing.assert_allclose(shown[index].numpy(), expected, atol=1e-3, rtol=1e-4, err_msg=str(sampling))
            assert output.logprobs[index].item() == pytest.approx(expected[token], abs=1e-3, rel=1e-4)


@pytest.mark.row("A: watermark")
@pytest.mark.parametrize("before", [0, 7, 151_642])
def test_green_tokens_are_those_of_the_documented_rule(before: int) -> None:
    green = green_list(torch.tensor([before, 3]), 301, 2**30)
    assert green[0].tolist() == [is_green(token, before, 0.25) for token in range(301)]
