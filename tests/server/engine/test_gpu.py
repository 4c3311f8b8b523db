"""The same loop on a CUDA device: never waiting on the way in, overlapped like synchronous, and the CPU's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tiny_shard import TinyShard
from tgi.hub import BUNDLED_MODEL, locate
from tgi.server.batch.step import RowChanges, StepPlan
from tgi.shard_client.messages import Sampling

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
    """Whatever would wait for the device inside `apply` or `launch` raises there."""
    apply, launch = shard.runner.apply, shard.runner.launch

    def strictly(function: Any, argument: Any) -> Any:
        try:
            torch.cuda.set_sync_debug_mode("error")
            return function(argument)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def strict_apply(changes: RowChanges) -> None:
        strictly(apply, changes)

    def strict_launch(plan: StepPlan) -> Any:
        return strictly(launch, plan)

    shard.runner.apply = strict_apply  # type: ignore[method-assign]
    shard.runner.launch = strict_launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        shard.runner.apply, shard.runner.launch = apply, launch  # type: ignore[method-assign]


def samplings() -> list[Sampling]:
    return [
        Sampling(),
        Sampling(do_sample=True, temperature=0.8, seed=1),
        Sampling(do_sample=True, top_k=5, seed=2),
        Sampling(do_sample=True, top_p=0.7, seed=3),
        Sampling(do_sample=True, min_p=0.05, temperature=1.4, seed=4),
        Sampling(raw_logprobs=True),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_launching_never_waits_for_the_device(model_path: Path, depth: int) -> None:
    shard = TinyShard(model_path, device="cuda:0", attention="paged", depth=depth)
    requests = [
        shard.admit(prompt, NEW, sampling=how, min_new_tokens=4, eos_ids=(3,))
        for prompt, how in zip(PROMPTS, samplings(), strict=True)
    ]
    with forbidding_waits(shard):
        answers = shard.run(requests, stagger=3)
    assert all(answer.ids for answer in answers)


def test_the_check_for_waits_can_fail(model_path: Path) -> None:
    shard = TinyShard(model_path, device="cuda:0", attention="paged")
    original = shard.runner.model.logits
    shard.runner.model.logits = lambda hidden: original(hidden) * hidden.sum().item()  # type: ignore[method-assign]
    with forbidding_waits(shard), pytest.raises(AssertionError, match="called a synchronizing CUDA operation"):
        shard.run([shard.admit([1, 2], 2)])


def test_overlapped_and_synchronous_loops_give_the_same_tokens(model_path: Path) -> None:
    plain = TinyShard(model_path, device="cuda:0", attention="paged", depth=1)
    ahead = TinyShard(model_path, device="cuda:0", attention="paged", depth=2)
    requests = list(zip(PROMPTS, samplings(), strict=True))
    first = plain.run([plain.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=2)
    second = ahead.run([ahead.admit(prompt, NEW, sampling=how) for prompt, how in requests], stagger=2)
    assert [answer.ids for answer in second] == [answer.ids for answer in first]
    assert ahead.engine.depth == 2


def test_seeded_tokens_equal_the_cpus(model_path: Path) -> None:
    """Noise is equal bit for bit on every device; logits differ by summation order alone."""
    device = TinyShard(model_path, device="cuda:0", attention="paged")
    host = TinyShard(model_path)
    requests = list(zip(PROMPTS, samplings(), strict=True))
    on_device = device.run([device.admit(prompt, NEW, sampling=how) for prompt, how in requests])
    on_host = host.run([host.admit(prompt, NEW, sampling=how) for prompt, how in requests])
    assert [answer.ids for answer in on_device] == [answer.ids for answer in on_host]


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
