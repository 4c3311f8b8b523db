"""Prompt logprobs of a real (tiny) model against transformers, in chunks and whole, alone and beside others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tiny_shard import Answer, TinyShard, pack
from tgi.server.batch.step import Scoring
from tgi.server.engine import prompt_scores
from tgi.server.engine.plan import PrefillBudget
from tgi.shard_client.messages import Command, Sampling

PROMPTS = [[5], [7, 8], list(range(10, 50)), [300, 20, 20, 20, 20], list(range(100, 230)), [44, 45] * 9]
VOCAB_SIZE = 512
TOP_N = 3


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model_path: Path) -> list[torch.Tensor]:
    """Log-probabilities of every token behind every position but the last, [positions - 1, vocab], by transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1) for prompt in PROMPTS]


def shard_of(model_path: Path, chunk: int, depth: int | None = None) -> TinyShard:
    return TinyShard(model_path, budget=PrefillBudget(chunk, chunk, chunked=True), depth=depth)


def check(answer: Answer, prompt: list[int], expected: torch.Tensor, top_n: int = TOP_N) -> None:
    """The parts follow each other without a gap and say what transformers says."""
    position = 0
    for part in answer.prompt:
        assert part.first_position == position
        position += len(part.logprobs)
        assert len(part.top_ids) == len(part.top_logprobs) == top_n * len(part.logprobs)
    assert position == len(prompt)
    logprobs = [value for part in answer.prompt for value in part.logprobs]
    assert math.isnan(logprobs[0])
    targets = torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1)
    assert logprobs[1:] == pytest.approx(expected.gather(1, targets).squeeze(1).tolist(), abs=1e-4)
    if top_n:
        ids = np.array([token for part in answer.prompt for token in part.top_ids]).reshape(-1, top_n)
        values = np.array([value for part in answer.prompt for value in part.top_logprobs]).reshape(-1, top_n)
        best = expected.topk(top_n, dim=-1)
        assert ids[1:].tolist() == best.indices.tolist()
        assert np.isnan(values[0]).all()
        np.testing.assert_allclose(values[1:], best.values.numpy(), atol=1e-4)


@pytest.mark.fault("TGI#2973")
@pytest.mark.fault("sglang#2088")
@pytest.mark.row("A: details, decoder_input_details")
@pytest.mark.parametrize(("chunk", "depth"), [(1000, 1), (24, 1), (24, 2), (7, 2)])
@pytest.mark.parametrize("stagger", [0, 2])
def test_equal_to_transformers_whole_and_in_chunks(
    model_path: Path, reference: list[torch.Tensor], chunk: int, depth: int, stagger: int
) -> None:
    shard = shard_of(model_path, chunk, depth)
    # None of this touches the model's own distribution; the second wants no alternatives, the last no logprobs.
    how = Sampling(do_sample=True, temperature=0.2, top_k=2, logit_bias=((20, 100.0),), repetition_penalty=1.9)
    admits = [shard.admit(prompt, 5, sampling=how, prompt_logprobs=True, prompt_top_n=TOP_N) for prompt in PROMPTS]
    admits[1] = replace(admits[1], prompt_top_n=0)
    admits[-1] = replace(admits[-1], prompt_logprobs=False)
    answers = shard.run(admits, stagger=stagger)
    for index, (answer, prompt, expected) in enumerate(zip(answers[:-1], PROMPTS, reference)):
        check(answer, prompt, expected, 0 if index == 1 else TOP_N)
    assert not answers[-1].prompt
    plain = shard.run([shard.admit(prompt, 5, sampling=how) for prompt in PROMPTS])
    assert [answer.ids for answer in answers] == [answer.ids for answer in plain]


def test_few_logits_exist_at_once(
    model_path: Path, reference: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_of(model_path, 1000)
    sizes: list[int] = []
    true_logits = shard.runner.model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return true_logits(hidden)

    monkeypatch.setattr(shard.runner.model, "logits", logits)
    monkeypatch.setattr(prompt_scores, "LOGITS_AT_ONCE", 16)
    (answer,) = shard.run([shard.admit(PROMPTS[4], 1, prompt_logprobs=True, prompt_top_n=TOP_N)])
    check(answer, PROMPTS[4], reference[4])
    assert sizes == [16] * 8 + [1] + [1]
    sizes.clear()
    shard.run([shard.admit(PROMPTS[4], 3)])
    assert sizes == [1] * 3


@pytest.mark.parametrize("chunk", [1000, 16])
def test_a_resumed_row_scores_its_prompt_and_not_its_answer(
    model_path: Path, reference: list[torch.Tensor], chunk: int
) -> None:
    shard = shard_of(model_path, chunk)
    admits = [shard.admit(PROMPTS[2], 30, generated=range(20), prompt_logprobs=True, prompt_top_n=TOP_N)]
    (answer,) = shard.run(admits)
    check(answer, PROMPTS[2], reference[2])
    assert len(answer.ids) == 10


def test_cached_positions_have_no_logits(model_path: Path, reference: list[torch.Tensor]) -> None:
    shard = shard_of(model_path, 1000)
    prompt, cached = PROMPTS[4], 3 * shard.block_size
    first = shard.admit(prompt, 1)
    shard.run([first])
    again = replace(shard.admit(prompt, 1, prompt_logprobs=True), cached_len=cached)
    own = np.frombuffer(again.blocks, np.uint32).tolist()
    again = replace(again, blocks=first.blocks[:12] + pack(own[3:]))
    (answer,) = shard.run([again])
    (part,) = answer.prompt
    assert part.first_position == cached + 1
    targets = torch.tensor(prompt[cached + 1 :]).unsqueeze(1)
    assert list(part.logprobs) == pytest.approx(reference[4][cached:].gather(1, targets)[:, 0].tolist(), abs=1e-4)


def test_a_row_that_ends_with_its_first_token_has_told_its_prompt(model_path: Path) -> None:
    shard = shard_of(model_path, 1000, depth=2)
    shard.engine.apply(Command(admit=[shard.admit([5, 6], 1, prompt_logprobs=True)]))
    step = shard.engine.step()
    assert step is not None
    assert step.ends
    assert len(step.prompt_logprobs[0].logprobs) == 2


def test_rows_of_a_step_part_with_their_scores() -> None:
    whole = Scoring(np.array([2, 0, 1, 3]), np.array([10, 11, 30, 40, 41, 42]), 5)
    part = whole.part(2, 4)
    assert (part.counts.tolist(), part.targets.tolist(), part.top_n) == ([1, 3], [30, 40, 41, 42], 5)
    assert whole.part(1, 2).targets.tolist() == []
