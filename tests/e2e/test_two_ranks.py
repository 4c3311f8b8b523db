"""Two ranks give the tokens of one, on one CPU and on two GPUs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.servers import Whole, launched
from tests.fakes.tiny_model import write_tiny_llama

GRAMMAR = {"type": "regex", "value": r"([A-Z][a-z]{2,5} ){4}[0-9]{4}"}


async def ask(server: Whole) -> list[Answer]:
    """Three requests at once: one is read in several chunks, one has a grammar."""
    async with Client(server.url) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(client.generate("hello world " * 60, max_new_tokens=40, ignore_eos=True)),
            group.create_task(client.generate("1 2 3", True, max_new_tokens=70, temperature=0.8, seed=5)),
            group.create_task(client.generate("x", max_new_tokens=99, temperature=0.8, seed=6, grammar=GRAMMAR)),
        ]
    return [task.result() for task in tasks]


@pytest.mark.slow
@pytest.mark.fault("vllm#11204")
@pytest.mark.row("E: Tensor parallel", "C: num_shard and sharded rules")
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", seed=13)
    options = ["--model-id", str(model), "--dtype", "float32", "--max-batch-prefill-tokens", "128"]
    options += ["--max-total-tokens", "1024"]
    with launched(*options) as server:
        alone = asyncio.run(ask(server))
        assert len(server.launcher.family()) == 3
    with launched(*options, "--num-shard", "2") as server:
        together = asyncio.run(ask(server))
        commands = list(server.launcher.family().values())
        assert server.launcher.stop(timeout_s=30) == 0, server.log
    assert sum("text-generation-server serve" in command for command in commands) == 2
    assert sum("text-generation-router" in command for command in commands) == 1
    assert [answer.told for answer in together] == [answer.told for answer in alone]
    assert len(alone[0].ids) == 40
    assert re.fullmatch(GRAMMAR["value"], alone[2].text)


@pytest.mark.gpu
def test_two_gpus_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Over NCCL: greedy, since seeded rows may tell apart sums in another order."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    async def ask_all(server: Whole) -> list[Answer]:
        async with Client(server.url) as client, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(client.generate("hello world " * length, True, max_new_tokens=40, ignore_eos=True))
                for length in range(1, 60, 3)
            ]
        return [task.result() for task in tasks]

    model = write_tiny_llama(tmp_path / "model", seed=13)
    options = ["--model-id", str(model), "--dtype", "float32", "--max-batch-prefill-tokens", "128"]
    options += ["--max-total-tokens", "1024"]
    found: list[list[Answer]] = []
    for num_shard in ("1", "2"):
        with launched(*options, "--num-shard", num_shard) as server:
            found.append(asyncio.run(ask_all(server)))
            assert server.launcher.stop(timeout_s=60) == 0, server.log
    assert [answer.ids for answer in found[1]] == [answer.ids for answer in found[0]]
    assert all(len(answer.ids) == 40 for answer in found[0])
