from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tiny_shard import Answer, TinyShard
from tgi.enums import EndReason
from tgi.server.engine.plan import PrefillBudget
from tgi.server.sampling.state import SamplingState
from tgi.shard_client.messages import Command, Sampling, TopTokens

PROMPTS = [[5], [7, 8, 9], list(range(10, 50)), [300, 20, 20, 20, 20], list(range(100, 230)), [44, 45] * 9]
NEW = 24


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def shard(model_path: Path) -> TinyShard:
    return TinyShard(model_path)


@pytest.fixture(scope="module")
def reference(model_path: Path) -> list[list[int]]:
    """Greedy ids by transformers, one prompt at a time, without a cache of ours."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.eval()
    answers: list[list[int]] = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("stagger", [0, 3])
def test_greedy_equals_transformers_batched_chunked_and_mixed(
    shard: TinyShard, reference: list[list[int]], stagger: int
) -> None:
    shard.reset()
    answers = shard.run([shard.admit(prompt, NEW) for prompt in PROMPTS], stagger=stagger)
    assert [answer.ids for answer in answers] == reference
    assert all(answer.end is EndReason.LENGTH for answer in answers)


@pytest.mark.slow
def test_a_resumed_request_goes_on_with_the_same_ids(shard: TinyShard, reference: list[list[int]]) -> None:
    shard.reset()
    for prompt, ids in zip(PROMPTS, reference, strict=True):
        (answer,) = shard.run([shard.admit(prompt, NEW, generated=ids[:10])])
        assert answer.ids == ids[10:]


@pytest.mark.fault("TGI#1776")
def test_batch_mates_do_not_change_an_answer(shard: TinyShard) -> None:
    shard.reset()
    sampling = [Sampling(do_sample=index % 2 == 1, temperature=0.9, seed=index) for index in range(len(PROMPTS))]
    requests = list(zip(PROMPTS, sampling, strict=True))
    alone = [shard.run([shard.admit(prompt, NEW, sampling=how)])[0] for prompt, how in requests]
    together = shard.run([shard.admit(prompt, NEW, sampling=how) for prompt, how in requests])
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert all(len(answer.ids) == NEW for answer in together)


def test_launching_ahead_changes_nothing(model_path: Path, shard: TinyShard) -> None:
    shard.reset()
    ahead = TinyShard(model_path, depth=2)
    requests = [(prompt, Sampling(do_sample=True, seed=3)) for prompt in PROMPTS]
    plain = shard.run([shard.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=2)
    overlapped = ahead.run([ahead.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=2)
    assert [answer.ids for answer in overlapped] == [answer.ids for answer in plain]


CONTROLS = [
    Sampling(do_sample=True, seed=1, repetition_penalty=1.4, typical_p=0.9),
    Sampling(do_sample=True, seed=2, frequency_penalty=1.2, presence_penalty=0.8, top_p=0.9, raw_logprobs=True),
    Sampling(do_sample=True, seed=3, watermark=True, logit_bias=((20, 3.0), (44, -100.0)), min_p=0.01),
    Sampling(repetition_penalty=1.7),
    Sampling(presence_penalty=2.0, logit_bias=((3, 1.0),), watermark=True),
    Sampling(do_sample=True, seed=6, temperature=0.7, top_k=40, repetition_penalty=1.1, frequency_penalty=0.3),
]


def test_a_step_whose_commit_fails_is_run_again_from_the_same_ids(
    shard: TinyShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.reset()
    unbroken = shard.run([shard.admit(prompt, 6, sampling=how) for prompt, how in zip(PROMPTS, CONTROLS)])
    commit, calls = SamplingState.commit, itertools.count(1)

    def failing(state: SamplingState, rows: torch.Tensor, ids: torch.Tensor, flags: int) -> None:
        if next(calls) == 3:
            raise MemoryError
        commit(state, rows, ids, flags)

    monkeypatch.setattr(SamplingState, "commit", failing)
    answers = shard.run([shard.admit(prompt, 6, sampling=how) for prompt, how in zip(PROMPTS, CONTROLS)])
    assert next(calls) > 8, "by halves"
    assert [answer.ids for answer in answers] == [answer.ids for answer in unbroken]


@pytest.mark.row("E: Sampling and seed semantics")
def test_every_control_gives_the_same_alone_together_in_chunks_ahead_and_resumed(
    model_path: Path, shard: TinyShard
) -> None:
    shard.reset()
    requests = list(zip(PROMPTS, CONTROLS, strict=True))
    alone = [shard.run([shard.admit(prompt, NEW, sampling=how)])[0].ids for prompt, how in requests]
    for stagger in (0, 3):
        together = shard.run([shard.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=stagger)
        assert [answer.ids for answer in together] == alone
    ahead = TinyShard(model_path, depth=2, budget=PrefillBudget(alone=16, beside_decode=16, chunked=True))
    # Rows end in turn while others run ahead: one result of each is dropped, and its slot goes to whoever comes next.
    first = ahead.run([ahead.admit([9] * 3, 2 + index, sampling=how) for index, how in enumerate(CONTROLS)])
    assert all(answer.end is EndReason.LENGTH for answer in first)
    overlapped = ahead.run([ahead.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=1)
    assert [answer.ids for answer in overlapped] == alone
    shard.reset()
    for known in (1, 11):
        resumed = shard.run(
            [
                shard.admit(prompt, NEW, sampling=how, generated=ids[:known])
                for (prompt, how), ids in zip(requests, alone)
            ]
        )
        assert [answer.ids for answer in resumed] == [ids[known:] for ids in alone]


@pytest.mark.fault("vllm#5898", "vllm#51187")
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="without AVX-512 products are oneDNN's")
def test_an_answer_has_the_same_bits_alone_and_in_company_of_47(model_path: Path) -> None:
    """Ids and logprobs, greedy and drawn, the longer prompts read in one piece or in several beside decoding rows."""
    shard = TinyShard(model_path, attention="cpu", max_rows=64)
    draws = Sampling(do_sample=True, seed=4, temperature=0.8, top_p=0.9)
    requests = list(itertools.product(PROMPTS, (Sampling(), draws)))

    def told(stagger: int, repeats: int) -> list[tuple[list[int], list[float]]]:
        shard.reset()
        admits = [shard.admit(prompt, NEW, sampling=how) for prompt, how in requests * repeats]
        return [(answer.ids, answer.logprobs) for answer in shard.run(admits, stagger=stagger)]

    alone = told(stagger=NEW + 10, repeats=1)
    for stagger in (0, 1):
        assert told(stagger, repeats=4) == alone * 4


def test_bad_words_hold_in_chunks_ahead_and_resumed(model_path: Path, shard: TinyShard) -> None:
    """Each request is forbidden what it would have written: pieces of one to five tokens."""
    shard.reset()
    hows = [Sampling(), Sampling(do_sample=True, seed=8), Sampling(do_sample=True, seed=9, temperature=0.7)]
    prompts = PROMPTS[:3]
    free = shard.run([shard.admit(prompt, NEW, sampling=how) for prompt, how in zip(prompts, hows)])
    words = [
        tuple(tuple(ids[at : at + size]) for at, size in ((3, 1), (5, 2), (8, 5))) for ids in (a.ids for a in free)
    ]
    hows = [replace(how, bad_words=its) for how, its in zip(hows, words)]
    requests = list(zip(prompts, hows))
    held = [shard.run([shard.admit(prompt, NEW, sampling=how)])[0].ids for prompt, how in requests]
    for ids, its in zip(held, words):
        assert not any(tuple(ids[at : at + len(word)]) == word for word in its for at in range(len(ids)))
    together = shard.run([shard.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=2)
    assert [answer.ids for answer in together] == held
    ahead = TinyShard(model_path, depth=2, budget=PrefillBudget(alone=16, beside_decode=16, chunked=True))
    overlapped = ahead.run([ahead.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=1)
    assert [answer.ids for answer in overlapped] == held
    for known in (4, 9):
        resumed = [
            shard.admit(prompt, NEW, sampling=how, generated=ids[:known]) for (prompt, how), ids in zip(requests, held)
        ]
        assert [answer.ids for answer in shard.run(resumed)] == [ids[known:] for ids in held]


def test_a_penalty_breaks_the_loop_of_a_greedy_answer(shard: TinyShard) -> None:
    shard.reset()
    answers = shard.run([shard.admit([20] * 9, 40), shard.admit([20] * 9, 40, sampling=Sampling(presence_penalty=2.0))])
    free, held = (len(set(answer.ids)) for answer in answers)
    assert held > free


@pytest.mark.parametrize(("kind", "reason"), [("eos_ids", EndReason.EOS), ("stop_ids", EndReason.STOP_ID)])
@pytest.mark.parametrize("known", [0, 1])
def test_ends_are_banned_before_min_new_tokens(shard: TinyShard, kind: str, reason: EndReason, known: int) -> None:
    """`min_new_tokens` counts from the prompt's end, also where the row goes on after `known` tokens."""
    shard.reset()
    (free,) = shard.run([shard.admit([7, 8, 9], 12)])
    end = free.ids[2]
    assert end not in free.ids[:2]

    def answer(min_new_tokens: int) -> Answer:
        generated = free.ids[:known]
        how = {kind: (end,), "min_new_tokens": min_new_tokens, "generated": generated}
        (answer,) = shard.run([shard.admit([7, 8, 9], 12, **how)])
        return replace(answer, ids=[*generated, *answer.ids])

    for enough in (0, 2):
        assert answer(enough).ids == free.ids[:3]
        assert answer(enough).end is reason
    for more in (3, 6):
        held = answer(more).ids
        assert held[:2] == free.ids[:2]
        assert end not in held[:more]
        assert len(held) > more
    ignored = shard.run([shard.admit([7, 8, 9], 12, eos_ids=(end,), ignore_eos=True, min_new_tokens=6)])[0]
    assert ignored.ids == free.ids, "an end that ends nothing is not banned"


def test_logprobs_are_of_the_chosen_ids(shard: TinyShard) -> None:
    shard.reset()
    (answer,) = shard.run([shard.admit([7, 8, 9], 12)])
    assert all(-20 < logprob <= 0 for logprob in answer.logprobs)


@pytest.mark.fault("sglang#2088")
@pytest.mark.row("A: top_n_tokens", "B: logprobs, top_logprobs")
def test_each_row_has_as_many_of_the_best_as_it_wants_at_every_position(model_path: Path, shard: TinyShard) -> None:
    """Raw as `/v1` wants them, or of what is left after the warpers as TGI's routes do; against transformers."""
    from transformers import LlamaForCausalLM

    shard.reset()
    hows = [
        (0, Sampling()),
        (2, Sampling(raw_logprobs=True)),
        (5, Sampling(do_sample=True, seed=1, temperature=0.5, top_k=3)),
        (4, Sampling(do_sample=True, seed=2, temperature=2.0, top_k=3, raw_logprobs=True)),
        (1, Sampling()),
    ]
    prompt, num_tokens = [7, 8, 9], 6
    admits = [replace(shard.admit(prompt, num_tokens, sampling=how), top_n=top_n) for top_n, how in hows]
    shard.engine.apply(Command(admit=admits))
    ids: dict[int, list[int]] = {admit.handle: [] for admit in admits}
    logprobs: dict[int, list[float]] = {admit.handle: [] for admit in admits}
    tops: dict[int, list[TopTokens]] = {admit.handle: [] for admit in admits}
    while (step := shard.engine.step()) is not None:
        for handle, token, logprob in zip(step.handles, step.token_ids, step.logprobs):
            ids[handle].append(token)
            logprobs[handle].append(logprob)
        for top in step.top_tokens:
            tops[top.handle].append(top)
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for admit, (top_n, how) in zip(admits, hows):
        assert len(ids[admit.handle]) == num_tokens
        assert len(tops[admit.handle]) == (num_tokens if top_n else 0)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids[admit.handle]]])).logits[0, len(prompt) - 1 : -1]
        if how.do_sample and not how.raw_logprobs:
            logits = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf) / how.temperature
            top_n = 3
        expected = torch.log_softmax(logits, -1)
        chosen = expected.gather(1, torch.tensor(ids[admit.handle])[:, None])[:, 0]
        assert logprobs[admit.handle] == pytest.approx(chosen.tolist(), abs=1e-4)
        for top, row in zip(tops[admit.handle], expected):
            best = row.topk(top_n)
            assert list(top.token_ids) == best.indices.tolist()
            assert list(top.logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.fault("vllm#9634")
@pytest.mark.fault("vllm#54195")
def test_ids_outside_the_vocabulary_never_reach_the_device(shard: TinyShard) -> None:
    shard.reset()
    for request in (shard.admit([512], 4), shard.admit([1], 4, stop_ids=(512,))):
        assert "outside the vocabulary" in (shard.runner.check(request) or "")
    # An EOS comes from the model's files, not from the client: one that the head lacks is no reason to refuse.
    (answer,) = shard.run([shard.admit([511], 4, eos_ids=(9999,), min_new_tokens=2)])
    assert len(answer.ids) == 4
