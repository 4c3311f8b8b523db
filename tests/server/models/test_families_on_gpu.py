"""Every family on a CUDA device, and split over two, says what it says on a CPU: the same weights, the same reference
back-end, float32."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.paged_logits import CPU, paged_logits
from tests.server.models.families import FAMILIES, VOCAB_SIZE, Family, write_model
from tests.server.models.test_families import run_ranks
from tgi.model_config import read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import SingleRank
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint

# transformers scripts a function of one family.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")]

TOLERANCE = 2e-3  # of a logit: other sums in another order
_RANDOM = random.Random(1)
SEQUENCES = [[_RANDOM.randrange(VOCAB_SIZE) for _ in range(length)] for length in (3, 40, 90)]


def logits_on(device: torch.device, path: Path) -> list[torch.Tensor]:
    checkpoint = open_checkpoint(path)
    model = build_model(read_model_config(path), checkpoint, torch.float32, device, SingleRank(), path=path)
    checkpoint.close()
    return paged_logits(model, TorchBackend("torch", 16), SEQUENCES, device=device)


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_a_gpu_computes_what_a_cpu_computes(row: Family, tmp_path: Path) -> None:
    write_model(row, tmp_path)
    for ours, expected in zip(logits_on(torch.device("cuda"), tmp_path), logits_on(CPU, tmp_path), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


def test_two_gpus_compute_what_a_cpu_computes(tmp_path: Path) -> None:
    """Over NCCL; one pair of processes serves all families."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    rows = [row for row in FAMILIES if row.ranks > 1]
    for row in rows:
        write_model(row, tmp_path / row.name)
    job = [{"path": str(tmp_path / row.name), "sequences": SEQUENCES} for row in rows]
    run_ranks(job, 2, tmp_path / "job.json", "cuda")
    wrong: list[str] = []
    for row in rows:
        ours = np.load(tmp_path / row.name / "ranks.npz")
        expected = logits_on(CPU, tmp_path / row.name)
        gaps = [float((torch.from_numpy(ours[f"arr_{index}"]) - own).abs().max()) for index, own in enumerate(expected)]
        if not max(gaps) <= TOLERANCE:
            wrong.append(f"{row.name}: {gaps}")
    assert not wrong, wrong
