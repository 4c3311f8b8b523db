"""Bias, watermark, penalties, masks, bans and typical-p against transformers' processors, on both paths."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.server.sampling.plain import is_green
from tests.server.sampling.requests import CONTROLS, choose, history, logits_like_a_models, make_state, masks
from tgi.server.sampling.processors import green_list, unpack
from tgi.server.sampling.sampler import SampleOutput
from tgi.shard_client.messages import Sampling

PATHS = ["fused", "composed"]
INF = math.inf


def run(logits, samplings, path="fused", top_n=0, allowed=None, ban=(), positions=None) -> SampleOutput:
    state = make_state(samplings, logits.shape[1], path, ban=ban)
    rows = torch.arange(len(samplings))
    return choose(state, logits, rows, rows + 50 if positions is None else positions, top_n, allowed)


def distribution(output: SampleOutput, row: int, vocab_size: int) -> torch.Tensor:
    """Logprobs of all tokens, in the order of ids; of a run whose top_n is the vocabulary."""
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    return torch.empty(vocab_size).scatter_(0, output.top_ids[row], output.top_logprobs[row])


def by_transformers(logits: torch.Tensor, sampling: Sampling, prompt: np.ndarray, generated: np.ndarray):
    """Scores [vocab] after every control that the request has, composed from the field's own."""
    scores = logits.unsqueeze(0).clone()
    ids = torch.from_numpy(np.concatenate([prompt, generated]).astype(np.int64)).unsqueeze(0)
    if sampling.logit_bias:
        bias = [[[token], float(value)] for token, value in sampling.logit_bias]
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if sampling.watermark:
        green = green_list(ids[:, -1], len(logits), 2**31)
        scores = scores + 2.0 * green
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.from_numpy(generated.astype(np.int64)), minlength=len(logits))
    scores = scores - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty
    if sampling.bad_words:
        # Theirs looks at the whole text: here it is shown the output alone.
        output = torch.from_numpy(generated.astype(np.int64)).unsqueeze(0)
        scores = NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words])(output, scores)
    if sampling.do_sample:
        scores = scores / sampling.temperature
        warpers = [
            TopKLogitsWarper(min(sampling.top_k, len(logits))) if sampling.top_k else None,
            TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1 else None,
            MinPLogitsWarper(sampling.min_p) if sampling.min_p else None,
            TypicalLogitsWarper(sampling.typical_p) if sampling.typical_p < 1 else None,
        ]
        for warper in warpers:
            scores = scores if warper is None else warper(ids, scores)
    return scores[0]


@pytest.mark.row("E: Sampling and seed semantics")
@pytest.mark.row("A: repetition_penalty, frequency_penalty")
@pytest.mark.row("A: Sampling: temperature, top_k, top_p, typical_p, do_sample, seed")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", range(len(CONTROLS)), ids=lambda row: f"control-{row}")
def test_distribution_equals_transformers(path, row):
    vocab_size = 300
    logits = logits_like_a_models(len(CONTROLS), vocab_size, seed=8)
    sampling = CONTROLS[row]
    output = run(logits, CONTROLS, path, top_n=vocab_size)
    scores = by_transformers(logits[row], sampling, *history(row, vocab_size))
    if not sampling.do_sample:
        assert output.ids[row] == scores.argmax()
    assert scores[output.ids[row]] > -INF
    shown = logits[row] if sampling.raw_logprobs else scores
    expected = torch.log_softmax(shown, -1)
    torch.testing.assert_close(distribution(output, row, vocab_size), expected, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(output.logprobs[row], expected[output.ids[row]], atol=3e-5, rtol=1e-5)


@pytest.mark.fault("TGI#965")
@pytest.mark.parametrize("vocab_size", [5, 64, 1003, 12_345])
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "flat", "half impossible", "masked", "early"])
def test_both_paths_choose_the_same(vocab_size, kind):
    logits = logits_like_a_models(len(CONTROLS), vocab_size, seed=vocab_size)
    allowed, ban = None, ()
    if kind == "bfloat16":
        logits = logits.bfloat16().float()
    if kind == "flat":
        logits = torch.zeros_like(logits)
    if kind == "half impossible":
        logits[:, 1::2] = -INF
    if kind == "masked":
        allowed = masks(len(CONTROLS), vocab_size)
        allowed[:, 0] |= 3
    if kind == "early":
        ban = (0, 2)
    outputs = [run(logits, CONTROLS, path, 4, allowed, ban) for path in PATHS]
    fused, composed = outputs
    assert not fused.is_nan.any()
    assert torch.equal(fused.ids, composed.ids)
    torch.testing.assert_close(fused.logprobs, composed.logprobs, atol=5e-6, rtol=1e-6)
    assert fused.top_logprobs is not None
    assert composed.top_logprobs is not None
    torch.testing.assert_close(fused.top_logprobs, composed.top_logprobs, atol=5e-6, rtol=1e-6)
    if allowed is not None:
        assert unpack(allowed, vocab_size).gather(1, fused.ids[:, None]).all()
    if ban:
        assert not np.isin(fused.ids, ban).any()


# Upper 0.1 % points of chi-square, for 1 to 15 degrees of freedom.
CHI_SQUARE = [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59, 31.26, 32.91, 34.53, 36.12, 37.70]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "controls",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.7, "presence_penalty": -0.4},
        {"logit_bias": ((2, 1.0), (5, -2.0), (7, -100.0))},
        {"typical_p": 0.6},
        {"temperature": 0.7},
        {"top_k": 6},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"watermark": True},
        {"bad_words": ((3,), (8, 1), (2, 8, 6), (4, 8, 7), (9, 2))},
        {"bad_words": ((8, 1), (5,)), "temperature": 1.3, "top_p": 0.9, "presence_penalty": 0.6},
        {"temperature": 1.4, "top_k": 11, "top_p": 0.95, "typical_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.8, "frequency_penalty": 1.0, "logit_bias": ((0, 2.0),), "min_p": 0.02, "watermark": True},
    ],
    ids=lambda controls: "+".join(controls),
)
def test_draws_follow_transformers_distribution(path, controls):
    draws, vocab_size = 4000, 16
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(6)) * 1.5
    prompt, generated = np.array([1, 2, 3, 3], np.uint32), np.array([4, 4, 4, 2, 8], np.uint32)
    samplings = [Sampling(do_sample=True, seed=seed * 0x9E3779B97F4A7C15 % 2**64, **controls) for seed in range(draws)]
    state = make_state(samplings, vocab_size, path)
    for index, sampling in enumerate(samplings):
        state.add(index, sampling, prompt, generated)
    rows = torch.arange(draws)
    output = choose(state, row.expand(draws, -1).contiguous(), rows, rows % 50)
    assert_drawn_from(by_transformers(row, samplings[0], prompt, generated), output.ids)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("controls", [{}, {"top_p": 0.7}, {"temperature": 1.3, "top_k": 6, "repetition_penalty": 1.5}])
@pytest.mark.parametrize("min_new_tokens", [5, 6])
def test_draws_before_and_behind_the_least_length(path, controls, min_new_tokens):
    """Behind 5 generated tokens: of 5 no end is forbidden any more, of 6 the last one is."""
    draws, vocab_size = 4000, 16
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(6)) * 1.5
    ends = row.topk(3).indices.tolist()[::2]
    prompt, generated = np.array([1, 2, 3, 3], np.uint32), np.array([4, 4, 4, 2, 8], np.uint32)
    samplings = [Sampling(do_sample=True, seed=seed * 0x9E3779B97F4A7C15 % 2**64, **controls) for seed in range(draws)]
    state = make_state(samplings, vocab_size, path)
    for index, sampling in enumerate(samplings):
        state.add(index, sampling, prompt, generated, len(prompt) + min_new_tokens, ends)
    rows = torch.arange(draws)
    positions = torch.full_like(rows, len(prompt) + len(generated))
    output = choose(state, row.expand(draws, -1).contiguous(), rows, positions)

    ids = torch.from_numpy(np.concatenate([prompt, generated]).astype(np.int64)).unsqueeze(0)
    theirs = MinNewTokensLengthLogitsProcessor(len(prompt), min_new_tokens, ends)
    assert_drawn_from(by_transformers(theirs(ids, row.unsqueeze(0))[0], samplings[0], prompt, generated), output.ids)


def assert_drawn_from(scores: torch.Tensor, ids: torch.Tensor) -> None:
    """By chi-square: `ids` [draws] follow the softmax of `scores` [vocab], and what is impossible is not among them."""
    expected = torch.softmax(scores.double(), 0) * len(ids)
    counts = torch.bincount(ids, minlength=len(scores)).double()
    possible = expected > 0
    assert not counts[~possible].any()
    # Cells of few expected draws are joined: the statistic is not one there.
    rare = possible & (expected < 5)
    cells = torch.cat([((counts - expected)[possible & ~rare]), (counts - expected)[rare].sum(0, keepdim=True)])
    sizes = torch.cat([expected[possible & ~rare], expected[rare].sum(0, keepdim=True)])
    used = sizes > 0
    statistic = (cells[used] ** 2 / sizes[used]).sum().item()
    assert statistic < CHI_SQUARE[int(used.sum()) - 2]


@pytest.mark.fault("TGI#2869")
@pytest.mark.row("B: n, presence_penalty, logit_bias")
@pytest.mark.parametrize("path", PATHS)
def test_bias_bans_and_forces_greedy_rows_too(path):
    logits = torch.zeros(3, 100)
    logits[:, 7] = 5.0
    samplings = [
        Sampling(logit_bias=((7, -100.0),)),
        Sampling(logit_bias=((99, 100.0), (7, 1.0)), raw_logprobs=True),
        Sampling(logit_bias=((7, -5.0), (3, 1.0), (3, 0.2), (4, 0.5))),  # named twice: the last value
    ]
    output = run(logits, samplings, path)
    assert output.ids.tolist() == [0, 99, 4]
    torch.testing.assert_close(output.logprobs[1], torch.log_softmax(logits[1], -1)[99])


@pytest.mark.row("B: n, presence_penalty, logit_bias")
@pytest.mark.parametrize("path", PATHS)
def test_openai_penalties_count_the_output_and_never_the_prompt(path):
    logits = torch.zeros(1, 50)
    state = make_state([Sampling()], 50, path)
    rows, sampling, prompt = torch.tensor([0]), Sampling(frequency_penalty=0.25, presence_penalty=0.5), [9] * 40
    for generated in ([], [4], [4, 4, 30]):
        state.add(0, sampling, np.array(prompt, np.uint32), np.array(generated, np.uint32))
        output = choose(state, logits, rows, rows + 40 + len(generated), top_n=50)
        expected = torch.zeros(50)
        for token in set(generated):
            expected[token] = -0.25 * generated.count(token) - 0.5
        torch.testing.assert_close(distribution(output, 0, 50), torch.log_softmax(expected, -1))


@pytest.mark.parametrize("path", PATHS)
def test_penalties_do_not_mind_neighbours(path):
    """The same row alone, beside longer and shorter ones, in another slot that another request has had."""
    vocab_size = 400
    logits = logits_like_a_models(len(CONTROLS), vocab_size, seed=2)
    together = run(logits, CONTROLS, path)
    for row, sampling in enumerate(CONTROLS):
        state = make_state(CONTROLS[:4], vocab_size, path)
        state.remove(2)
        state.add(2, sampling, *history(row, vocab_size))
        alone = choose(state, logits[row : row + 1], torch.tensor([2]), torch.tensor([row + 50]))
        assert alone.ids[0] == together.ids[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row].item(), abs=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_a_resumed_row_counts_as_the_row_that_ran_on(path):
    """Token by token with commits; and from each point on anew, from prompt and generated ids."""
    vocab_size, steps = 60, 12
    logits = logits_like_a_models(steps, vocab_size, seed=5) * 0.5
    samplings = [
        Sampling(repetition_penalty=1.8, frequency_penalty=0.9),
        Sampling(do_sample=True, seed=3, presence_penalty=1.5, watermark=True),
        Sampling(watermark=True),
        Sampling(),
    ]
    prompt = np.array([5, 6, 7], np.uint32)

    def answer(ids: list[list[int]]) -> list[list[int]]:
        state = make_state(samplings, vocab_size, path)
        for row, sampling in enumerate(samplings):
            state.add(row, sampling, prompt, np.array(ids[row], np.uint32))
        rows = torch.arange(len(samplings))
        ids = [list(row) for row in ids]
        for step in range(len(ids[0]), steps):
            row_logits = logits[step].expand(len(samplings), -1).contiguous()
            output = choose(state, row_logits, rows, torch.full_like(rows, 3 + step), commits=True)
            for row, token in zip(ids, output.ids.tolist()):
                row.append(token)
        return ids

    free = answer([[]] * len(samplings))[-1]
    # What the last row writes when it may: so each of these words begins in its answer.
    words = ((free[1], free[2]), tuple(free[4:8]), tuple(free[9:11]))
    samplings[-1] = Sampling(bad_words=words)
    whole = answer([[]] * len(samplings))
    assert len(set(whole[0])) > 4
    assert whole[-1][:2] == free[:2]
    assert whole[-1][2] != free[2]
    assert not any(tuple(whole[-1][at : at + len(word)]) == word for word in words for at in range(steps))
    for resumed in (1, 5, 11):
        assert answer([row[:resumed] for row in whole]) == whole


@pytest.mark.parametrize("path", PATHS)
def test_a_result_that_is_dropped_is_not_counted(path):
    logits = logits_like_a_models(1, 60)
    state = make_state([Sampling(frequency_penalty=2.0)], 60, path)
    rows = torch.tensor([0])
    first = choose(state, logits, rows, rows + 30, top_n=60)
    again = choose(state, logits, rows, rows + 30, top_n=60, commits=True)
    assert torch.equal(first.logprobs, again.logprobs)
    assert distribution(choose(state, logits, rows, rows + 31, top_n=60), 0, 60)[first.ids[0]] < first.logprobs[0] - 1


@pytest.mark.parametrize("path", PATHS)
def test_a_mask_holds_for_every_row_that_has_one_and_hides_from_raw_logprobs(path):
    logits = logits_like_a_models(4, 200)
    samplings = [Sampling(), Sampling(raw_logprobs=True), Sampling(do_sample=True, seed=1), Sampling()]
    allowed = torch.zeros(4, 7, dtype=torch.int32)
    allowed[:, 6] = 1 << 7  # token 199 alone
    allowed[3] = -1
    output = run(logits, samplings, path, top_n=200, allowed=allowed)
    assert output.ids.tolist() == [199, 199, 199, int(logits[3].argmax())]
    assert output.logprobs[[0, 2]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(distribution(output, 1, 200), torch.log_softmax(logits[1], -1))
    torch.testing.assert_close(distribution(output, 3, 200), torch.log_softmax(logits[3], -1))


@pytest.mark.parametrize("path", PATHS)
def test_no_control_makes_up_for_a_mask_and_nan_is_not_hidden_by_it(path):
    logits = torch.zeros(3, 64)
    logits[1, 40] = math.nan
    allowed = torch.zeros(3, 2, dtype=torch.int32)
    allowed[:2, 0] = 6  # tokens 1 and 2
    output = run(logits, [Sampling(logit_bias=((40, 100.0),), watermark=True)] * 3, path, allowed=allowed)
    assert output.is_nan.tolist() == [False, True, True]  # the third has nothing left
    assert output.ids.tolist()[1:] == [0, 0]
    assert output.ids[0] in (1, 2)


@pytest.mark.parametrize("path", PATHS)
def test_bans_end_at_their_position_and_give_way_to_a_mask_that_leaves_nothing_else(path):
    logits = torch.zeros(3, 64)
    logits[:, 5], logits[:, 6] = 9.0, 8.0
    allowed = torch.full((3, 2), -1, dtype=torch.int32)
    allowed[2] = 0
    allowed[2, 0] = 1 << 5
    positions = torch.tensor([999, 1000, 999])
    output = run(logits, [Sampling(raw_logprobs=True)] * 3, path, allowed=allowed, ban=(5,), positions=positions)
    assert output.ids.tolist() == [6, 5, 5]
    torch.testing.assert_close(output.logprobs[0], torch.log_softmax(logits[0], -1)[6])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("word", "generated", "is_forbidden"),
    [
        ((7,), [], True),
        ((7,), [7, 7], True),
        ((4, 7), [4], True),
        ((4, 7), [9, 9, 4], True),
        ((4, 7), [], False),  # the prompt ends with 4
        ((4, 7), [4, 9], False),
        ((7, 7), [7], True),
        ((1, 2, 3, 7), [1, 2, 3], True),
        ((1, 2, 3, 7), [2, 3], False),
        ((1, 2, 3, 7), [0, 2, 3], False),
        ((0, 7), [0], True),
        ((0, 0, 7), [0], False),
        ((*range(31), 7), list(range(31)), True),
        ((*range(31), 7), [9, *range(1, 31)], False),
    ],
)
def test_a_bad_word_never_comes_to_its_end(path, word, generated, is_forbidden):
    logits = torch.zeros(2, 40)
    logits[:, 7], logits[:, 8] = 9.0, 8.0
    other = Sampling(bad_words=((3,) * 5, (2,)))
    state = make_state([Sampling()] * 4, 40, path)
    for row, sampling in ((0, other), (1, Sampling(bad_words=((39, 7), word, (7, 39)))), (2, other)):
        state.add(row, sampling, np.array([4], np.uint32), np.array(generated, np.uint32))
    rows = torch.tensor([1, 3])
    output = choose(state, logits, rows, rows + 60, top_n=40)
    assert output.ids.tolist() == [8 if is_forbidden else 7, 7]
    assert (distribution(output, 0, 40)[7] == -INF) == is_forbidden
    assert (distribution(output, 1, 40) > -INF).all()


@pytest.mark.parametrize("path", PATHS)
def test_a_table_that_grows_keeps_the_words_of_the_rows_before(path):
    logits = torch.zeros(1, 64)
    logits[0, 7] = 9.0
    state = make_state([Sampling()] * 9, 64, path)

    def chosen(row: int) -> int:
        return int(choose(state, logits, torch.tensor([row]), torch.tensor([60])).ids[0])

    state.add(0, Sampling(bad_words=((5, 7),)), generated_ids=np.array([5], np.uint32))
    for row in range(1, 9):
        words = tuple((token,) * (2 * row) for token in range(20, 21 + row))
        state.add(row, Sampling(bad_words=words), generated_ids=np.array([20] * row, np.uint32))
        assert chosen(0) != 7
        assert chosen(row) == 7
    size = state.tables.bad_words.shape
    for row in range(9):
        state.remove(row)
        state.add(row, Sampling(bad_words=((20, 20),)), generated_ids=np.array([1], np.uint32))
    assert state.tables.bad_words.shape == size
    assert chosen(0) == 7


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "how", [Sampling(bad_words=((5, 7),)), Sampling(presence_penalty=2.0), Sampling(watermark=True)]
)
def test_a_row_knows_nothing_of_the_row_that_had_its_slot(path, how):
    logits = logits_like_a_models(2, 64)
    logits[:, 7] = logits.amax() + 0.5
    state = make_state([Sampling()] * 2, 64, path)
    rows, prompt = torch.arange(2), np.array([9], np.uint32)
    state.add(0, how, prompt, np.array([7, 5], np.uint32))
    state.remove(0)
    for row in (0, 1):  # one takes the slot, the other a new one
        state.add(row, how, prompt)
    output = choose(state, logits[:1].expand(2, -1).contiguous(), rows, rows * 0 + 1, top_n=64)
    assert output.ids[0] == output.ids[1]
    assert torch.equal(distribution(output, 0, 64), distribution(output, 1, 64))


@pytest.mark.fault("TGI#965")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("allowed_ids", "expected"),
    [
        ([5, 6], 6),  # the grammar leaves a bad word and the end: the answer ends, though too early
        ([5], 5),
        ([6], 6),
        ([5, 6, 9], 9),
        ([5, 9], 9),
        ([6, 9], 9),
    ],
)
def test_bans_masks_and_bad_words_together_leave_a_token(path, allowed_ids, expected):
    """5 is a bad word and 6 an end that comes too early."""
    allowed = torch.zeros(2, 2, dtype=torch.int32)
    for token in allowed_ids:
        allowed[:, 0] |= 1 << token
    bad = ((5,), (5,), (63,))
    samplings = [Sampling(bad_words=bad), Sampling(do_sample=True, seed=3, bad_words=bad)]
    output = run(torch.zeros(2, 64), samplings, path, allowed=allowed, ban=(6,))
    assert output.ids.tolist() == [expected] * 2
    assert output.logprobs.tolist() == [0.0, 0.0]


@pytest.mark.fault("TGI#965")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "controls",
    [
        {"repetition_penalty": 3e38},
        {"bad_words": tuple((token,) for token in range(50))},
        {"repetition_penalty": 1e-38},
        {"typical_p": 1e-9},
        {"typical_p": 1e-9, "top_p": 1e-9, "top_k": 1, "min_p": 1.0},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "logit_bias": tuple((t, -100.0) for t in range(50))},
        {"temperature": 1e-4, "typical_p": 0.5, "repetition_penalty": 100.0},
    ],
    ids=str,
)
def test_one_token_always_stays_possible(path, controls):
    vocab_size = 50
    for scale in (0.0, 1.0, 1e4):
        logits = logits_like_a_models(8, vocab_size) * scale
        output = run(logits, [Sampling(do_sample=True, seed=seed, **controls) for seed in range(8)], path)
        assert not output.is_nan.any()
        assert (output.logprobs > -INF).all()
        greedy = {key: value for key, value in controls.items() if key.endswith(("penalty", "bias", "words"))}
        assert not run(logits, [Sampling(**greedy)] * 8, path).is_nan.any()


def test_half_of_the_tokens_are_green_and_the_last_id_draws_them():
    green = green_list(torch.tensor([1, 2, 1]), 50_000, 2**31)
    assert (green.float().mean(-1) - 0.5).abs().max() < 0.01
    assert torch.equal(green[0], green[2])
    assert ((green[0] ^ green[1]).float().mean() - 0.5).abs() < 0.01
    assert not green_list(torch.tensor([3]), 100, 0).any()
    assert green_list(torch.tensor([3]), 100, 2**32).all()


@pytest.mark.row("A: watermark")
@pytest.mark.parametrize("path", PATHS)
def test_a_watermark_can_be_found_in_the_answer(path):
    """The share of green tokens by the documented rule, as the paper's detector counts it, and without a watermark."""
    vocab_size, steps = 500, 200
    samplings = [Sampling(do_sample=True, seed=1, watermark=True), Sampling(do_sample=True, seed=1)]
    state = make_state(samplings, vocab_size, path)
    rows, hits = torch.arange(2), torch.zeros(2)
    last = [int(np.concatenate(history(row, vocab_size))[-1]) for row in range(2)]
    for step in range(steps):
        logits = logits_like_a_models(1, vocab_size, seed=step).expand(2, -1).contiguous() * 0.4
        ids = choose(state, logits, rows, rows + 40 + step, commits=True).ids
        hits += torch.tensor([is_green(token, before) for token, before in zip(ids.tolist(), last)])
        last = ids.tolist()
    z = (hits - 0.5 * steps) / (steps * 0.25) ** 0.5
    assert z[0] > 4
    assert abs(z[1]) < 3


# What rows may ask for, in the mixtures whose steps differ in kind. Bans and masks are on top.
STEPS = {
    "greedy": Sampling(),
    "greedy with raw logprobs": Sampling(raw_logprobs=True),
    "temperature": Sampling(do_sample=True, temperature=0.7),
    "top_k": Sampling(do_sample=True, top_k=20),
    "a large top_k": Sampling(do_sample=True, top_k=2000),
    "top_p and min_p": Sampling(do_sample=True, top_p=0.9, min_p=0.01),
    "typical_p": Sampling(do_sample=True, typical_p=0.5),
    "penalties": Sampling(repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5),
    "logit_bias": Sampling(logit_bias=((1, 3.0), (2, -3.0))),
    "watermark": Sampling(watermark=True),
    "bad_words": Sampling(bad_words=((5,), (1, 2, 3))),
    "everything": replace(CONTROLS[14], bad_words=((5,), (1, 2, 3)), raw_logprobs=True),
}


def operations(n: int, sampling: Sampling, path: str, is_held: bool) -> Counter[str]:
    """How often a step of `n` such rows, its commit included, calls each torch operation."""
    vocab_size = 257  # of no other size here, so that a shape tells
    state = make_state([sampling] * n, vocab_size, path, ban=(3,) if is_held else ())
    rows, logits = torch.arange(n), logits_like_a_models(n, vocab_size)
    allowed = masks(n, vocab_size) if is_held else None
    top_n = 3 if is_held else 0
    choose(state, logits, rows, rows, top_n, allowed, commits=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        choose(state, logits, rows, rows, top_n, allowed, commits=True)
    events = [event for event in profiled.events() if event.name.startswith("aten::")]
    for event in events:
        selects = "topk" in event.name and (top_n or sampling.top_k)
        if "sort" in event.name or ("topk" in event.name and not selects):  # of the few best alone
            assert all(vocab_size not in shape for shape in event.input_shapes), event.name
    return Counter(event.name for event in events)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_held", [False, True], ids=["free", "with top_n, masked and banned"])
@pytest.mark.parametrize("kind", STEPS)
def test_the_host_works_alike_for_one_row_and_for_64(kind, is_held, path):
    """Torch operations of a step: no loop over rows; over the vocabulary no sort, nor a selection without need."""
    assert STEPS["everything"].watermark
    assert STEPS["everything"].typical_p < 1.0
    one, many = (operations(n, STEPS[kind], path, is_held) for n in (1, 64))
    assert sum(one.values()) > 0
    assert abs(sum(many.values()) - sum(one.values())) <= 0.05 * sum(one.values()), many - one
