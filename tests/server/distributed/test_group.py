"""A rank alone, two ranks over gloo, and ranks that do not find each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.contiguous_attention import greedy_ids, prompt_logits
from tests.fakes.tiny_model import write_tiny_llama
from tests.server.distributed import rank
from tgi.errors import StartupError
from tgi.model_config import read_model_config
from tgi.server.distributed.group import SingleRank, make_group
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_rank_alone_exchanges_nothing() -> None:
    group = make_group(0, 1, "nowhere", 0, "cpu")
    tensor = torch.randn(3)
    assert isinstance(group, SingleRank)
    assert group.all_reduce_(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert group.broadcast_(tensor) is tensor
    group.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("number", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist(number: int, world_size: int) -> None:
    with pytest.raises(StartupError, match=f"rank {number} does not exist in a world of {world_size}"):
        make_group(number, world_size, "127.0.0.1", 1, "cpu")


def run_ranks(model: Path, out: Path) -> list[dict[str, Any]]:
    port = str(free_port())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, rank.__file__, str(number), port, str(model), str(out / f"{number}.json")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    return [json.loads((out / f"{number}.json").read_text()) for number in range(2)]


@pytest.mark.slow
@pytest.mark.row("E: Tensor parallel")
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie": True, "bias": True, "vocab_size": 521}],  # split vocabulary; one that does not divide
    ids=["split", "tied-odd-vocabulary"],
)
def test_two_ranks_compute_what_one_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_tiny_llama(tmp_path / "model", **changes)
    results = run_ranks(path, tmp_path)
    for result in results:
        assert result["total"] == [3.0, 30.0]
        assert result["half"] == [2.0, 2.0, 2.0]
        assert result["columns"] == [[0, 1, 2, 100, 101, 102], [3, 4, 5, 103, 104, 105]]
        assert result["rows"] == [[0, 2, 4], [1, 3, 5], [100, 102, 104], [101, 103, 105]]
        assert result["told"] == [7, 8]
        assert result["heads"] == [2, 1]

    model = build_model(
        read_model_config(path), open_checkpoint(path), torch.float32, torch.device("cpu"), SingleRank()
    )
    alone = prompt_logits(model, rank.PROMPT)
    torch.testing.assert_close(torch.tensor(results[0]["logits"]), alone, rtol=0, atol=1e-4)
    assert results[0]["greedy"] == greedy_ids(model, rank.PROMPT, 8)


@pytest.mark.slow
def test_ranks_that_do_not_find_each_other_say_so() -> None:
    script = (
        "from tgi.server.distributed.group import make_group\n"
        "from tgi.errors import StartupError\n"
        "import sys\n"
        "try:\n"
        "    make_group(1, 2, '127.0.0.1', int(sys.argv[1]), 'cpu', timeout_s=1)\n"
        "except StartupError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(free_port())]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.startswith("rank 1 of 2 could not join the others at 127.0.0.1:")
    assert "within 1 s" in output
    assert output.count("\n") == 1
