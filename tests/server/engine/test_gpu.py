"""The same loop on a CUDA device: never waiting on the way in, overlapped like synchronous, and the CPU's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.masks import LateMasks
from tests.fakes.tiny_model import EOS_ID, IM_END_ID, write_tiny_llama
from tests.fakes.tiny_shard import TinyShard
from tgi.hub import BUNDLED_MODEL, locate
from tgi.server.grammar.vocabulary import read_vocabulary
from tgi.shard_client.messages import Admit, Grammar, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

PROMPTS = [[5], [7, 8, 9], list(range(10, 50)), [300, 20, 20, 20, 20], list(range(100, 230)), [44, 45] * 9]
NEW = 32
REFERENCE = Path(__file__).parents[2] / "data" / "smollm2_greedy.json"
TINY_MARGIN = 0.01  # in float32: what summation order may turn


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def forbidding_waits(shard: TinyShard) -> Iterator[None]:
    """Whatever would wait for the device on the way in raises there."""
    runner = shard.runner
    ways_in = {name: getattr(runner, name) for name in ("apply", "launch", "forward", "has_forwarded", "choose")}

    def strict(function: Any) -> Any:
        def strictly(*arguments: Any) -> Any:
            before = torch.cuda.get_sync_debug_mode()
            try:
                torch.cuda.set_sync_debug_mode("error")
                return function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return strictly

    for name, function in ways_in.items():
        setattr(runner, name, strict(function))
    try:
        yield
    finally:
        for name, function in ways_in.items():
            setattr(runner, name, function)


def samplings() -> list[Sampling]:
    return [
        Sampling(),
        Sampling(do_sample=True, temperature=0.8, seed=1),
        Sampling(do_sample=True, top_k=5, seed=2),
        Sampling(do_sample=True, top_p=0.7, seed=3),
        Sampling(do_sample=True, min_p=0.05, temperature=1.4, seed=4),
        Sampling(raw_logprobs=True),
    ]


def controls() -> list[Sampling]:
    everything = Sampling(
        do_sample=True,
        temperature=0.9,
        top_k=80,
        top_p=0.95,
        min_p=0.001,
        typical_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.4,
        watermark=True,
        logit_bias=((20, 2.0), (44, -100.0), (5, 0.5)),
    )
    return [
        replace(everything, seed=1),
        replace(everything, seed=2, raw_logprobs=True),
        replace(everything, do_sample=False),
        Sampling(frequency_penalty=2.0),
        Sampling(do_sample=True, typical_p=0.5, seed=3),
        Sampling(logit_bias=((9, 3.0),), watermark=True, raw_logprobs=True),
    ]


KINDS = pytest.mark.parametrize("kind", [samplings, controls])


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
def test_launching_never_waits_for_the_device(model_path: Path, depth: int, kind: Callable[[], list[Sampling]]) -> None:
    shard = TinyShard(model_path, device="cuda:0", attention="paged", depth=depth)
    requests = [
        shard.admit(
            prompt,
            NEW,
            sampling=how,
            min_new_tokens=4,
            eos_ids=(3,),
            prompt_logprobs=True,
            prompt_top_n=len(prompt) % 3,
        )
        for prompt, how in zip(PROMPTS, kind(), strict=True)
    ]
    with forbidding_waits(shard):
        answers = shard.run(requests, stagger=3)
    assert all(answer.ids for answer in answers)
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert sum(len(part.logprobs) for part in answer.prompt) == len(prompt)


def test_the_check_for_waits_can_fail(model_path: Path) -> None:
    shard = TinyShard(model_path, device="cuda:0", attention="paged")
    original = shard.runner.model.logits
    shard.runner.model.logits = lambda hidden: original(hidden) * hidden.sum().item()  # type: ignore[method-assign]
    with forbidding_waits(shard), pytest.raises(AssertionError, match="called a synchronizing CUDA operation"):
        shard.run([shard.admit([1, 2], 2)])


@KINDS
def test_overlapped_and_synchronous_loops_give_the_same_tokens(
    model_path: Path, kind: Callable[[], list[Sampling]]
) -> None:
    plain = TinyShard(model_path, device="cuda:0", attention="paged", depth=1)
    ahead = TinyShard(model_path, device="cuda:0", attention="paged", depth=2)
    requests = list(zip(PROMPTS, kind(), strict=True))
    first = plain.run([plain.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=2)
    second = ahead.run([ahead.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=2)
    assert [answer.ids for answer in second] == [answer.ids for answer in first]
    assert ahead.engine.depth == 2


@KINDS
def test_seeded_tokens_equal_the_cpus(model_path: Path, kind: Callable[[], list[Sampling]]) -> None:
    """Noise is equal bit for bit on every device; logits differ by summation order alone."""
    device = TinyShard(model_path, device="cuda:0", attention="paged")
    host = TinyShard(model_path)
    requests = list(zip(PROMPTS, kind(), strict=True))
    on_device = device.run([device.admit(prompt, NEW, sampling=how) for prompt, how in requests])
    on_host = host.run([host.admit(prompt, NEW, sampling=how) for prompt, how in requests])
    assert [answer.ids for answer in on_device] == [answer.ids for answer in on_host]


def under_grammars(shard: TinyShard) -> list[Admit]:
    """Every other row has a grammar."""
    grammars = [None, Grammar("regex", "[a-f]{3,20}(,[0-9]{1,9}){1,3}"), Grammar("json_schema", '{"type": "object"}')]
    return [
        shard.admit(prompt, NEW, sampling=how, eos_ids=(EOS_ID,), grammar=grammars[index % 2 * (1 + index % 3 % 2)])
        for index, (prompt, how) in enumerate(zip(PROMPTS, samplings(), strict=True))
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lateness", [(0,), (0, 1, 3)], ids=["in time", "late"])
def test_grammars_make_no_launch_wait_and_give_the_cpus_tokens(
    model_path: Path, depth: int, lateness: tuple[int, ...]
) -> None:
    vocabulary = read_vocabulary(model_path, 512, (IM_END_ID,))
    host = TinyShard(model_path, masks=LateMasks(vocabulary, lateness=(0,)))
    masks = LateMasks(vocabulary, seed=5, lateness=lateness)
    device = TinyShard(model_path, device="cuda:0", attention="paged", depth=depth, masks=masks)
    expected = [answer.ids for answer in host.run(under_grammars(host))]
    with forbidding_waits(device):
        answers = device.run(under_grammars(device), stagger=2)
    assert [answer.ids for answer in answers] == expected
    assert bool(masks.num_late) == (len(lateness) > 1)


@pytest.mark.real_model
def test_bundled_model_is_greedy_like_the_reference() -> None:
    shard = TinyShard(locate(BUNDLED_MODEL), device="cuda:0", attention="paged", num_blocks=600)
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    admits = [shard.admit(prompt["input_ids"], len(prompt["fp32"]["ids"]), eos_ids=(2,)) for prompt in prompts]
    for prompt, answer in zip(prompts, shard.run(admits), strict=True):
        expected, margins = prompt["fp32"]["ids"], prompt["fp32"]["margin"]
        differs = next((i for i, (a, b) in enumerate(zip(answer.ids, expected)) if a != b), None)
        assert differs is None or margins[differs] < TINY_MARGIN, (prompt["prompt"], differs)
        assert differs is not None or answer.ids == expected
