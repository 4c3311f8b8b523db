"""Padded models under load: prompts read together, rows that come and go, and what of a step's failure hits whom.

That answers are those of transformers is asked of every family in test_row_keepers.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.tiny_shard import TinyShard
from tests.server.models.families import PADDED, VOCAB_SIZE, Family, write_model
from tests.server.models.test_families import assert_best
from tests.server.models.test_row_keepers import choices
from tgi.server.engine.plan import PrefillBudget
from tgi.server.models.padded_model import Batching, PaddedDecoder, PaddedEncoderDecoder
from tgi.shard_client.messages import Command, RowError

T5, BART, BIOGPT, LFM2 = (next(row for row in PADDED if row.name == name) for name in ("t5", "bart", "biogpt", "lfm2"))
WHOLE = PrefillBudget(alone=200, beside_decode=200, chunked=False, padded=True)
POISON = VOCAB_SIZE - 1


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shard_of(row: Family, path: Path, **others: Any) -> tuple[TinyShard, Any]:
    reference = write_model(row, path)
    return TinyShard(path, budget=WHOLE, **others), reference


def padded(shard: TinyShard) -> Any:
    model = shard.runner.model
    assert isinstance(model, PaddedDecoder | PaddedEncoderDecoder)
    return model


def prompt_of(random_: random.Random, longest: int = 60) -> list[int]:
    return [random_.randrange(2, POISON) for _ in range(random_.randrange(1, longest))]


class Calls:
    """How many rows and tokens each call of a model's decoder had; fails where it is told to."""

    def __init__(self, model: Any, poison: int | None = None) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.failures = 0  # of the calls to come
        self._poison = poison  # an id
        module = model.module
        inner = [part for part in module.modules() if isinstance(part, torch.nn.Linear)][-1]  # caches have grown
        module.register_forward_pre_hook(self._note, with_kwargs=True)
        inner.register_forward_pre_hook(self._fail)
        self._ids = torch.empty(0)

    def _note(self, _: torch.nn.Module, __: tuple[()], given: dict[str, Any]) -> None:
        ids = given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"]
        self.shapes.append(tuple(ids.shape))
        self._ids = ids

    def _fail(self, *_: object) -> None:
        if self.failures:
            self.failures -= 1
            raise MemoryError("no memory")
        if self._poison is not None and (self._ids == self._poison).any():
            raise ValueError("poison")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(T5, id="t5"),
        pytest.param(BIOGPT, id="biogpt", marks=pytest.mark.slow),
        pytest.param(BART, id="bart", marks=pytest.mark.slow),
    ],
)
def test_prompts_of_a_step_are_read_together(row: Family, tmp_path: Path) -> None:
    shard, reference = shard_of(row, tmp_path)
    model = padded(shard)
    calls, random_ = Calls(model), random.Random(1)
    prompts = [[random_.randrange(2, POISON) for _ in range(length)] for length in (17, 20, 30)]
    admits = [shard.admit(prompt, 6) for prompt in prompts]
    shard.engine.apply(Command(admit=admits))
    plan = shard.engine.plan()
    assert plan is not None
    assert plan.num_rows == 3
    shard.engine.launch(plan)
    answers = {handle: [token] for handle, token in zip(*_handles_and_tokens(shard), strict=True)}
    read = 30 if isinstance(model, PaddedDecoder) else 1
    assert calls.shapes == [(3, read)]
    while (plan := shard.engine.plan()) is not None:
        shard.engine.launch(plan)
        for handle, token in zip(*_handles_and_tokens(shard), strict=True):
            answers[handle].append(token)
    for prompt, admit in zip(prompts, admits, strict=True):
        assert_best(choices(reference, prompt, answers[admit.handle]), answers[admit.handle], row.tolerance)


def _handles_and_tokens(shard: TinyShard) -> tuple[list[int], list[int]]:
    step = shard.engine.collect()
    assert not step.errors
    return list(step.handles), list(step.token_ids)


def test_a_step_reads_no_more_than_its_budget_padding_and_all(tmp_path: Path) -> None:
    shard, _ = shard_of(BIOGPT, tmp_path)
    calls = Calls(padded(shard))
    lens = (100, 55, 40, 60, 60, 50, 20, 10, 120)
    shard.engine.apply(Command(admit=[shard.admit([5] * length, 1) for length in lens]))
    read = 0
    while (plan := shard.engine.plan()) is not None:
        calls.shapes.clear()
        shard.engine.launch(plan)
        shard.engine.collect()
        assert sum(rows * tokens for rows, tokens in calls.shapes) <= WHOLE.alone
        read += plan.num_tokens
    assert read == sum(lens)


@pytest.mark.slow
@pytest.mark.parametrize("row", [T5, BART, BIOGPT, LFM2], ids=lambda row: row.name)
def test_forty_rows_come_and_go_while_steps_fail(row: Family, tmp_path: Path) -> None:
    """Random lengths, cancels, preemptions and lack of memory in the middle of steps: every answer is the one its
    prompt has alone."""
    shard, reference = shard_of(row, tmp_path, num_blocks=2_000)
    engine, random_ = shard.engine, random.Random(3)
    calls = Calls(padded(shard))
    waiting = [(prompt_of(random_), random_.randrange(1, 30)) for _ in range(40)]
    running: dict[int, tuple[list[int], int, list[int]]] = {}  # prompt, most, answer so far
    finished: list[tuple[list[int], list[int]]] = []
    num_cancelled = num_preempted = 0
    while waiting or running:
        while waiting and len(running) < 12 and random_.random() < 0.6:
            prompt, most = waiting.pop()
            admit = shard.admit(prompt, most)
            running[admit.handle] = prompt, most, []
            engine.apply(Command(admit=[admit]))
        if running and random_.random() < 0.1:
            handle = random_.choice(list(running))
            prompt, most, answer = running.pop(handle)
            engine.apply(Command(cancel=[handle]))
            if answer and random_.random() < 0.7:
                admit = shard.admit(prompt, most, generated=answer)
                running[admit.handle] = prompt, most, answer
                engine.apply(Command(admit=[admit]))
                num_preempted += 1
            else:
                num_cancelled += 1
        if (plan := engine.plan()) is None:
            continue
        calls.failures = random_.random() < 0.04
        engine.launch(plan)
        step = engine.collect()
        assert not step.errors
        for index, (handle, token) in enumerate(zip(step.handles, step.token_ids, strict=True)):
            prompt, most, answer = running[handle]
            answer.append(token)
            if step.end_of(index):
                finished.append((prompt, answer))
                del running[handle]
    assert num_cancelled and num_preempted
    assert len(finished) + num_cancelled == 40
    for prompt, answer in finished:
        assert_best(choices(reference, prompt, answer), answer, row.tolerance)


@pytest.mark.parametrize("row", [pytest.param(T5, id="t5"), pytest.param(BIOGPT, id="biogpt", marks=pytest.mark.slow)])
def test_a_row_that_breaks_its_step_fails_alone(row: Family, tmp_path: Path) -> None:
    shard, reference = shard_of(row, tmp_path)
    Calls(padded(shard), POISON)
    random_ = random.Random(5)
    prompts = [prompt_of(random_) for _ in range(6)]
    admits = [shard.admit(prompt, 8) for prompt in prompts]
    poisoned = shard.admit(prompts[2], 8, generated=[POISON])  # a decoder meets it, in whatever it reads
    errors: dict[int, RowError] = {}
    answers = shard.run([*admits[:3], poisoned, *admits[3:]], errors=errors)
    assert set(errors) == {poisoned.handle}
    assert "poison" in errors[poisoned.handle].message
    for prompt, answer in zip(prompts, [*answers[:3], *answers[4:]], strict=True):
        assert_best(choices(reference, prompt, answer.ids), answer.ids, row.tolerance)


@pytest.mark.parametrize("row", [pytest.param(T5, id="t5"), pytest.param(BIOGPT, id="biogpt", marks=pytest.mark.slow)])
def test_a_lone_prompt_without_memory_is_read_in_pieces_or_again(row: Family, tmp_path: Path) -> None:
    """An encoder reads a prompt as a whole or not at all: a piece of it is no prompt."""
    shard, reference = shard_of(row, tmp_path)
    calls, random_ = Calls(padded(shard)), random.Random(7)
    prompt = [random_.randrange(2, POISON) for _ in range(40)]
    calls.failures = 1
    (answer,) = shard.run([shard.admit(prompt, 12)])
    assert_best(choices(reference, prompt, answer.ids), answer.ids, row.tolerance)
    calls.failures = 1
    resumed = shard.admit(prompt, 12, generated=answer.ids[:5])
    (rest,) = shard.run([resumed])
    assert_best(choices(reference, prompt, answer.ids[:5] + rest.ids)[5:], rest.ids, row.tolerance)


@pytest.mark.slow
def test_what_every_answer_begins_with_is_the_decoders_to_read(tmp_path: Path) -> None:
    """As transformers' generate has it, which counts that token as generated."""
    forced, prompt = 7, [9, 50, 3, 77, 31]
    reference: Any = write_model(T5, tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "forced_bos_token_id": forced}))
    shard = TinyShard(tmp_path, budget=WHOLE)
    assert padded(shard).batching is Batching.ANY
    generated = reference.generate(
        torch.tensor([prompt]),
        **{"do_sample": False, "max_new_tokens": 13, "min_new_tokens": 13, "forced_bos_token_id": forced},
        eos_token_id=None,
    )[0].tolist()
    assert generated[1] == forced
    assert len(set(generated)) > 4
    alone, beside, _ = shard.run(
        [shard.admit(prompt, 12), shard.admit(prompt, 12), shard.admit(prompt[::-1], 12)], stagger=2
    )
    assert alone.ids == beside.ids == generated[2:]
    (resumed,) = shard.run([shard.admit(prompt, 12, generated=alone.ids[:4])])
    assert alone.ids[4:] == resumed.ids


@pytest.mark.slow
def test_a_long_neighbour_does_not_turn_a_rows_positions(tmp_path: Path) -> None:
    """Dynamic rope follows the longest text of a step, in transformers' own code."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    settings = {"max_position_embeddings": 64, "rope_parameters": rope}
    shard, _ = shard_of(Family("diffllama", "DiffLlamaConfig", "dynamic rope", settings), tmp_path)
    assert padded(shard).batching is Batching.ANY
    (alone,) = shard.run([shard.admit([5, 9, 70, 13], 20)])
    beside, _ = shard.run([shard.admit([5, 9, 70, 13], 20), shard.admit([7] * 60 + [8] * 60, 20)])
    torch.testing.assert_close(torch.tensor(beside.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_half_precision_reads_and_decodes_together_and_follows_float32(tmp_path: Path) -> None:
    shard, reference = shard_of(T5, tmp_path, dtype=torch.bfloat16)
    assert (padded(shard).batching, padded(shard).reads_together) == (Batching.ANY, True)
    random_ = random.Random(9)
    prompts = [prompt_of(random_) for _ in range(4)]
    for prompt, answer in zip(prompts, shard.run([shard.admit(prompt, 20) for prompt in prompts]), strict=True):
        logits = choices(reference, prompt, answer.ids)
        theirs = logits.log_softmax(1).gather(1, torch.tensor(answer.ids).unsqueeze(1)).squeeze(1)
        assert float((torch.tensor(answer.logprobs) - theirs).abs().median()) < 0.1
