"""Models that keep what they have read by row: Mamba's states, and transformers' own caches.

As the families with files: greedy answers of prompts that share steps are the reference's best choice at each token,
given what our own answer has before it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_shard import TinyShard
from tests.server.models.families import PADDED, RECURRENT, SIZES, VOCAB_SIZE, Family, write_model
from tests.server.models.test_families import assert_best, by_lane
from tgi.enums import EndReason
from tgi.errors import StartupError
from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.engine.device import Constraint
from tgi.server.engine.engine import Limits
from tgi.server.engine.leader import LeaderDevice
from tgi.server.engine.plan import PrefillBudget
from tgi.server.engine.warmup import WarmUp
from tgi.server.models import padded_model
from tgi.server.models.padded_model import Batching, PaddedDecoder, PaddedEncoderDecoder
from tgi.server.platforms.detect import detect
from tgi.server.resolve import ServeArgs, resolve
from tgi.shard_client.messages import Command, Step, WarmupRequest, WarmupResult

NEW = 24
T5, BART = (next(row for row in PADDED if row.name == name) for name in ("t5", "bart"))
LEARNED = ("bart", "biogpt", "mbart")  # positions, which come to an end
RESUMED = 9
WHOLE = PrefillBudget(alone=100, beside_decode=100, chunked=False)
CHUNKS = PrefillBudget(alone=24, beside_decode=12, chunked=True)
_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in (2, 11, 40)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more, and lose where other processes want the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shard_of(row: Family, path: Path) -> tuple[TinyShard, Any]:
    reference = write_model(row, path)
    return TinyShard(path, budget=CHUNKS if row in RECURRENT else WHOLE), reference


@torch.inference_mode()
def choices(reference: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """[len(answer), vocab]: what each token of the answer was chosen from."""
    config = reference.config
    if config.is_encoder_decoder:
        read = [config.decoder_start_token_id, *answer[:-1]]
        output = reference(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([read]), use_cache=False)
        return output.logits[0].float()
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    return reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()


@pytest.mark.row("E: Seq2seq, Mamba, padded models")
@pytest.mark.parametrize("row", by_lane((*RECURRENT, *PADDED)))
def test_answers_are_those_of_transformers_beside_others_resumed_and_run_again(row: Family, tmp_path: Path) -> None:
    shard, reference = shard_of(row, tmp_path)
    found = shard.run([shard.admit(prompt, NEW) for prompt in PROMPTS], stagger=3)
    answers = [answer.ids for answer in found]
    assert shard.runner.model.cache_shape.max_positions == (512 if row.name in LEARNED else None)
    expected = [choices(reference, *pair) for pair in zip(PROMPTS, answers, strict=True)]
    assert {len(answer) for answer in answers} == {NEW}
    assert len({token for answer in answers for token in answer}) >= len(PROMPTS)
    for logits, answer in zip(expected, found, strict=True):
        assert_best(logits, answer.ids, row.tolerance)
        theirs = logits.log_softmax(1).gather(1, torch.tensor(answer.ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(answer.logprobs), theirs, rtol=0, atol=2 * row.tolerance)

    again = [
        shard.admit(prompt, NEW, generated=answer[:RESUMED]) for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    for logits, answer in zip(expected, shard.run(again), strict=True):
        assert_best(logits[RESUMED:], answer.ids, row.tolerance)

    assert_best(expected[-1], _stuttering(shard, PROMPTS[-1]), row.tolerance)


def _stuttering(shard: TinyShard, prompt: Sequence[int]) -> list[int]:
    """An answer of which every second step is run twice, as after a lack of memory (rule 3)."""
    engine = shard.engine
    engine.apply(Command(admit=[shard.admit(prompt, NEW)]))
    answer: list[int] = []
    while (plan := engine.plan()) is not None:
        if len(answer) % 2 and not engine.has_errors:
            shard.runner.forward(plan)
        engine.launch(plan)
        answer += engine.collect().token_ids
    return answer


@pytest.mark.parametrize(
    ("row", "forwards"),
    [
        pytest.param(T5, 1, id="t5"),
        pytest.param(PADDED[0], 1, id="biogpt", marks=pytest.mark.slow),
        pytest.param(BART, 3, id="bart", marks=pytest.mark.slow),
    ],
)
def test_rows_decode_in_one_forward_a_step_also_where_one_fails_or_is_run_again(
    row: Family, forwards: int, tmp_path: Path
) -> None:
    """Of BART, whose positions come from its cache, those that have said as much as each other."""
    shard, reference = shard_of(row, tmp_path)
    engine, model = shard.engine, shard.runner.model
    assert isinstance(model, PaddedDecoder | PaddedEncoderDecoder)
    prompts = [*PROMPTS, PROMPTS[1][::-1]]
    admits = [shard.admit(prompt, NEW) for prompt in prompts]
    answers: dict[int, list[int]] = {admit.handle: [] for admit in admits}
    calls = _Calls(model.module)
    for new in (admits[:1], admits[1:2], admits[2:], []):
        engine.apply(Command(admit=list(new)))
        for number in range(1 if new else NEW):
            if (plan := engine.plan()) is None:
                break
            if number % 5 == 2:
                calls.fail_in_the_middle(lambda plan=plan: shard.runner.forward(plan))
            if number % 5 > 2:
                shard.runner.forward(plan)
            calls.rows.clear()
            engine.launch(plan)
            assert new or len(calls.rows) == forwards or len(plan.rows) < len(prompts)
            for handle, token in zip(plan.handles[plan.samples].tolist(), engine.collect().token_ids, strict=True):
                answers[handle].append(token)
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        assert len(answer) == NEW
        assert_best(choices(reference, prompt, answer), answer, row.tolerance)


class _Calls:
    """The rows of each call of a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.rows: list[int] = []
        self._last = [part for part in module.modules() if isinstance(part, torch.nn.Linear)][-1]  # caches have grown
        module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: torch.nn.Module, __: tuple[()], given: dict[str, Any]) -> None:
        self.rows.append(len(given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"]))

    def fail_in_the_middle(self, call: Callable[[], object]) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        hook = self._last.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            call()
        hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize(("row", "batching"), [(PADDED[0], Batching.EVEN), (T5, Batching.NONE)], ids=["biogpt", "t5"])
def test_a_model_that_looks_at_padding_is_not_given_any(
    row: Family, batching: Batching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are padded also where answers have one length."""
    for mask in ("left_mask", "right_mask"):
        monkeypatch.setattr(padded_model, mask, lambda of, width, _: torch.ones(len(of), width, dtype=torch.int64))
    shard, _ = shard_of(row, tmp_path)
    assert isinstance(shard.runner.model, PaddedDecoder | PaddedEncoderDecoder)
    assert shard.runner.model.batching is batching


@pytest.mark.slow
def test_a_cached_prefix_is_refused_and_rows_that_ended_are_given_up(tmp_path: Path) -> None:
    shard, _ = shard_of(PADDED[0], tmp_path)
    admit = shard.admit(PROMPTS[-1] * 2, 4)
    hit = dataclasses.replace(admit, cached_len=shard.block_size)
    assert shard.runner.check(hit) == "this model shares no prefixes"
    shard.run([shard.admit(prompt, 3) for prompt in PROMPTS])
    shard.run([shard.admit(PROMPTS[0], 1)])
    assert isinstance(shard.runner.model, PaddedDecoder)
    assert shard.runner.model.num_rows <= 1  # who ended is given up with the next change


@pytest.mark.slow
def test_why_a_model_is_not_paged_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {**SIZES, "layer_types": ["conv", "full_attention"], "block_ff_dim": 96}
    with caplog.at_level(logging.INFO, logger="tgi.server.models"):
        shard_of(Family("lfm2", "Lfm2Config", "", settings), tmp_path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "model_type 'lfm2' is served through transformers, row by row with its own cache: "
        "its layers do not each attend once"
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", [*RECURRENT, T5], ids=lambda row: row.name)
def test_a_prompt_whose_row_sits_out_is_read_but_for_its_last_token(row: Family, tmp_path: Path) -> None:
    """As under a grammar whose mask is late: nothing is chosen, and the next step computes the last position again."""
    shard, reference = shard_of(row, tmp_path)
    runner, prompt = shard.runner, PROMPTS[-1]
    admit = shard.admit(prompt, NEW)
    blocks = np.frombuffer(admit.blocks, np.int32)
    runner.apply(RowChanges([], [(1, admit)], [(1, 0, blocks)]))
    launched = runner.forward(_plan(0, prompt))
    runner.choose(launched, Constraint(np.zeros(1, np.bool_), np.empty(0, np.int64), np.empty((0, 0), np.int32)))
    last = len(prompt) - 1
    plans = [
        _plan(last, prompt[-1:]),
        *(_plan(position, [0], from_device=True) for position in range(last + 1, last + 5)),
    ]
    answer = [int(runner.collect(runner.launch(plan)).ids[0]) for plan in plans]
    assert_best(choices(reference, prompt, answer), answer, row.tolerance)


def _plan(start: int, ids: Sequence[int], from_device: bool = False) -> StepPlan:
    """A step of row 1 alone, which chooses."""
    return StepPlan(
        number=1,
        handles=np.ones(1, np.uint64),
        rows=np.ones(1, np.int64),
        starts=np.full(1, start),
        query_lens=np.full(1, len(ids)),
        samples=np.ones(1, np.bool_),
        from_device=np.full(1, from_device),
        ids=np.array(ids, np.int64),
    )


@pytest.mark.slow
def test_where_nothing_grows_with_a_text_every_row_may_have_all_it_wants(tmp_path: Path) -> None:
    shard, _ = shard_of(RECURRENT[0], tmp_path)
    result, limits = warm_up(shard, tmp_path, max_rows=4, max_total_tokens=256)
    assert result.max_batch_total_tokens == 4 * 256
    assert limits.budget.chunked
    with pytest.raises(StartupError, match=r"1000000000 requests at a time need .* MiB for their states, but"):
        warm_up(shard, tmp_path, max_rows=10**9)


@pytest.mark.slow
def test_caches_of_transformers_are_counted_as_blocks(tmp_path: Path) -> None:
    shard, _ = shard_of(T5, tmp_path)
    token_bytes = 2 * 2 * 4 * 12 * 4  # keys and values, layers, heads, their size, float32
    shape = shard.runner.model.cache_shape
    assert shape.token_bytes == 4 * token_bytes  # padding may double it, and a join does
    assert shape.row_bytes == token_bytes + 64 * 4  # the decoder's first token, and the shape of what the encoder said
    result, _ = warm_up(shard, tmp_path, max_rows=4, max_total_tokens=256)
    assert result.max_batch_total_tokens >= 256


def warm_up(shard: TinyShard, path: Path, **values: int) -> tuple[WarmupResult, Limits]:
    config = resolve(ServeArgs(model_id="m"), path, detect(), {"ATTENTION": "torch"})
    device = LeaderDevice(shard.runner, [])
    return WarmUp(device, config, detect(), None).run(WarmupRequest(max_batch_prefill_tokens=512, **values))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_states_of_rows_that_come_and_go_stay_apart(depth: int, tmp_path: Path) -> None:
    """64 requests on 8 rows, prompts in pieces of a few tokens; some are cancelled at any point, also while they are
    read, some come back under another handle. Every answer, and each prompt's logprobs, are those of the text alone."""
    random_ = random.Random(depth)
    reference = write_model(RECURRENT[0], tmp_path)
    budget = PrefillBudget(alone=7, beside_decode=5, chunked=True)
    shard = TinyShard(tmp_path, budget=budget, num_blocks=5000, max_rows=8, depth=depth)
    engine = shard.engine
    waiting = [_Request(_prompt(random_), random_.randrange(1, 20)) for _ in range(64)]
    requests = list(waiting)
    live: dict[int, _Request] = {}
    num_cancelled = num_resumed = 0
    while waiting or live:
        cancelled = [random_.choice(list(live))] if live and random_.random() < 0.15 else []
        for request in map(live.pop, cancelled):
            num_cancelled += 1
            if random_.random() < 0.7:
                waiting.append(request)
                num_resumed += 1
        admits = []
        while waiting and len(live) < 8 and random_.random() < 0.6:
            request = waiting.pop(0)
            request.scores = []
            scored = not request.answer
            admit = shard.admit(request.prompt, request.new, generated=request.answer, prompt_logprobs=scored)
            admits.append(admit)
            live[admit.handle] = request
        engine.apply(Command(cancel=cancelled, admit=admits))
        for _ in range(random_.randrange(1, 4)):
            plan = engine.plan() if engine.num_in_flight < engine.depth else None
            if plan is not None:
                engine.launch(plan)
            if engine.num_in_flight and (engine.num_in_flight == engine.depth or plan is None):
                _note(engine.collect(), live)
    assert num_cancelled > num_resumed > 5
    for request in requests:
        prompt, answer = request.prompt, request.answer
        if answer:
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + answer]), use_cache=False).logits[0].float()
            assert_best(logits[len(prompt) - 1 : -1], answer, 1e-4)
            if len(request.scores) == len(prompt):  # it came to its end at once
                theirs = logits.log_softmax(1)[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1))
                torch.testing.assert_close(torch.tensor(request.scores[1:]), theirs.squeeze(1), rtol=0, atol=2e-4)


@dataclasses.dataclass
class _Request:
    prompt: list[int]
    new: int
    answer: list[int] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)


def _prompt(random_: random.Random) -> list[int]:
    return [random_.randrange(2, VOCAB_SIZE) for _ in range(random_.choice((1, 2, 3, 7, 24, 25, 60)))]


def _note(step: Step, live: dict[int, _Request]) -> None:
    assert not step.errors
    for part in step.prompt_logprobs:
        if part.handle in live:
            live[part.handle].scores += part.logprobs
    for index, handle in enumerate(step.handles):
        if handle in live:
            live[handle].answer.append(step.token_ids[index])
            if step.end_of(index) != EndReason.RUNNING:
                del live[handle]


@pytest.mark.slow
def test_mambas_first_files_are_the_same_model(tmp_path: Path) -> None:
    """They say no model_type, count the ids in use alone, and have names of their own."""
    shard, _ = shard_of(RECURRENT[0], tmp_path)
    expected = [answer.ids for answer in shard.run([shard.admit(prompt, NEW) for prompt in PROMPTS])]
    first = {"d_model": 64, "n_layer": 2, "vocab_size": VOCAB_SIZE - 3, "pad_vocab_size_multiple": 8, "rms_norm": True}
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors")

    def write(ssm: dict[str, Any], **values: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**first, "ssm_cfg": ssm, **values}))

    write({"d_state": 8})
    shard = TinyShard(tmp_path, budget=CHUNKS)
    assert [answer.ids for answer in shard.run([shard.admit(prompt, NEW) for prompt in PROMPTS])] == expected
    write({"layer": "Mamba2"})
    with pytest.raises(StartupError, match='layer "Mamba2" is not supported, only "Mamba1"'):
        TinyShard(tmp_path)
    write({"d_state": 8}, rms_norm=False)
    with pytest.raises(StartupError, match="rms_norm false is not supported"):
        TinyShard(tmp_path)
