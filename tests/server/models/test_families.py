"""Every family against transformers, on a tiny random model in float32.

Greedy answers are compared token by token on what our own answer has before it: each is the reference's best choice
there, so the two would have said the same from the start. A few families of different kinds run in the slow lane, all
of them in the soak; `make soak K=<name>` runs one.
"""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.paged_logits import paged_logits
from tests.fakes.tiny_shard import TinyShard
from tests.server.models.families import (
    FAMILIES,
    RECURRENT,
    THROUGH_TRANSFORMERS,
    VOCAB_SIZE,
    Family,
    reference_logits,
    write_model,
)
from tgi.model_config import read_model_config
from tgi.server.attention.cpu_backend import CpuBackend
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import SingleRank
from tgi.server.engine.plan import PrefillBudget
from tgi.server.models.registry import MODULES, build_model, has_module
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
NEW = 48
CHUNKS = PrefillBudget(alone=60, beside_decode=24, chunked=True)  # the longer prompts take several steps
_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 17, 40, 71, 133)]
CACHED = 128  # of the last prompt: two blocks of the CPU's cache
RESUMED = 20  # answered before the preemption
QUICK = [row for row in FAMILIES if row.quick]
RANKS_TIMEOUT_S = 600


@dataclasses.dataclass(slots=True)
class Made:
    """A family's model on disk, what our engine answered, and what transformers makes of prompt and answer."""

    path: Path
    shard: TinyShard
    answers: list[list[int]]
    last_blocks: bytes  # of the last prompt's row
    expected: list[torch.Tensor]  # per prompt: logits [prompt + answer, vocab]

    @property
    def sequences(self) -> list[list[int]]:
        return [prompt + answer for prompt, answer in zip(PROMPTS, self.answers, strict=True)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Made]:
    """Each family once, however many tests ask."""
    known: dict[str, Made] = {}

    def make(row: Family) -> Made:
        if row.name not in known:
            known[row.name] = _make(row, tmp_path_factory.mktemp(row.name))
        return known[row.name]

    return make


def _make(row: Family, path: Path) -> Made:
    reference = write_model(row, path)
    shard = TinyShard(path, attention="cpu", budget=CHUNKS)
    admits = [shard.admit(prompt, NEW) for prompt in PROMPTS]
    answers = [answer.ids for answer in shard.run(admits, stagger=2)]
    expected = [reference_logits(reference, prompt + answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return Made(path, shard, answers, admits[-1].blocks, expected)


def by_lane(rows: Iterable[Family] = (*FAMILIES, *THROUGH_TRANSFORMERS)) -> list[object]:
    """Parameters: the quick ones in the slow lane, the others in the soak alone."""
    return [pytest.param(row, id=row.name, marks=pytest.mark.slow if row.quick else pytest.mark.soak) for row in rows]


@pytest.mark.row("E: Architectures")
@pytest.mark.parametrize("row", by_lane())
def test_greedy_answers_are_those_of_transformers(row: Family, made: Callable[[Family], Made]) -> None:
    """Six prompts share the steps, the longer ones read in chunks beside decoding rows."""
    model = made(row)
    assert {len(answer) for answer in model.answers} == {NEW}
    assert len({token for answer in model.answers for token in answer}) > 20  # a model that says something
    for prompt, answer, logits in zip(PROMPTS, model.answers, model.expected, strict=True):
        assert_best(logits[len(prompt) - 1 : -1], answer, row.tolerance)


@pytest.mark.parametrize("row", by_lane())
def test_logits_are_those_of_transformers(row: Family, made: Callable[[Family], Made]) -> None:
    """Through the reference back-end: with the answers above, both back-ends of a CPU have been asked. And no tensor of
    the checkpoint is left over."""
    model = made(row)
    checkpoint = TrackedCheckpoint(open_checkpoint(model.path))
    config = read_model_config(model.path)
    built = build_model(config, checkpoint, torch.float32, CPU, SingleRank(), path=model.path)
    if has_module(config):
        checkpoint.check_all_read()
    checkpoint.close()
    logits = paged_logits(built, TorchBackend("torch", 16), model.sequences)
    for ours, theirs in zip(logits, model.expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=row.tolerance)


@pytest.mark.parametrize("row", by_lane())
def test_bfloat16_follows_float32(row: Family, made: Callable[[Family], Made]) -> None:
    model = made(row)
    checkpoint = open_checkpoint(model.path)
    config = read_model_config(model.path)
    built = build_model(config, checkpoint, torch.bfloat16, CPU, SingleRank(), path=model.path)
    checkpoint.close()
    (logits,) = paged_logits(built, CpuBackend(), model.sequences[-1:], torch.bfloat16)
    expected = model.expected[-1]
    assert logits.dtype == torch.float32
    # The median: a router's close choice may fall the other way and change a token's logits altogether.
    assert float((logits - expected).abs().median()) < 0.05 * float(expected.std())


@pytest.mark.parametrize("row", by_lane())
def test_a_cached_prefix_and_a_preemption_change_nothing(row: Family, made: Callable[[Family], Made]) -> None:
    model = made(row)
    shard = model.shard
    hit = shard.admit(PROMPTS[-1], NEW)
    blocks = model.last_blocks[: CACHED // shard.block_size * 4] + hit.blocks[CACHED // shard.block_size * 4 :]
    hit = dataclasses.replace(hit, cached_len=CACHED, blocks=blocks)
    resumed = [
        shard.admit(prompt, NEW, generated=answer[:RESUMED])
        for prompt, answer in zip(PROMPTS, model.answers, strict=True)
    ]
    after_hit, *after_preemption = (answer.ids for answer in shard.run([hit, *resumed]))
    assert_best(model.expected[-1][len(PROMPTS[-1]) - 1 : -1], after_hit, row.tolerance)
    for prompt, rest, logits in zip(PROMPTS, after_preemption, model.expected, strict=True):
        assert_best(logits[len(prompt) - 1 + RESUMED : -1], rest, row.tolerance)


def test_every_model_type_has_a_row_and_every_row_a_file() -> None:
    rows = (*FAMILIES, *RECURRENT)
    assert {model_type for row in rows for model_type in row.model_types} == set(MODULES)
    assert len({row.name for row in FAMILIES}) == len(FAMILIES)
    assert len(QUICK) >= 6


@pytest.mark.row("E: Tensor parallel")
@pytest.mark.slow
def test_two_ranks_give_the_same_logits_for_the_quick_families(made: Callable[[Family], Made]) -> None:
    check_ranks(QUICK, made)


@pytest.mark.soak
def test_two_ranks_give_the_same_logits_for_every_family(made: Callable[[Family], Made]) -> None:
    check_ranks(FAMILIES, made)


def check_ranks(rows: Sequence[Family], made: Callable[[Family], Made]) -> None:
    """One pair of processes serves them all; every family that is wrong is named."""
    models = {row.name: made(row) for row in rows if row.ranks > 1}
    job = [{"path": str(model.path), "sequences": model.sequences} for model in models.values()]
    run_ranks(job, 2, next(iter(models.values())).path / "job.json")
    wrong: list[str] = []
    for row in rows:
        if row.ranks > 1:
            model = models[row.name]
            ours = np.load(model.path / "ranks.npz")
            gaps = [
                float((torch.from_numpy(ours[f"arr_{index}"]) - logits).abs().max())
                for index, logits in enumerate(model.expected)
            ]
            if not max(gaps) <= row.tolerance:
                wrong.append(f"{row.name}: {gaps}")
    assert not wrong, wrong


def run_ranks(job: object, world: int, file: Path, device: str = "cpu") -> None:
    file.write_text(json.dumps(job))
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "tests.fakes.rank_families"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(port), str(file), device], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    try:
        errors = [rank.communicate(timeout=RANKS_TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, errors


def assert_best(logits: torch.Tensor, chosen: Sequence[int], tolerance: float) -> None:
    """Every choice is the best of its line [len(chosen), vocab]; where two are as good, either."""
    own = logits.gather(1, torch.tensor(chosen).unsqueeze(1)).squeeze(1)
    gaps = logits.amax(1) - own
    assert float(gaps.max()) <= 2 * tolerance, gaps.tolist()
