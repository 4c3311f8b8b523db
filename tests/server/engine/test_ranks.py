from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_model import write_tiny_llama

ROOT = Path(__file__).parents[3]
REQUESTS = [
    [[5, 6, 7], 12, None],
    [list(range(40, 90)), 9, None],
    [[300], 16, None],
    [[7, 8], 14, "[a-z]{40}"],
]


def run(model: Path, world: int) -> tuple[list[list[int]], list[float]]:
    """The answers, and the logprobs of the second prompt."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.fakes.rank_program",
                model,
                str(rank),
                str(world),
                str(port),
                json.dumps(REQUESTS),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, [errors for _, errors in outputs]
    answers, scores = json.loads(outputs[0][0])
    return answers, scores


@pytest.mark.slow
def test_two_ranks_answer_like_one_though_they_round_differently(tmp_path: Path) -> None:
    """Rank 0 alone chooses; its ids reach the others by a broadcast, so no rank's own rounding can lead it astray."""
    model = write_tiny_llama(tmp_path / "tiny")
    alone, scores = run(model, 1)
    assert [len(ids) for ids in alone] == [count for _, count, _ in REQUESTS]
    assert len(scores) == len(REQUESTS[1][0]) - 1
    together, shared_scores = run(model, 2)
    assert together == alone
    assert shared_scores == pytest.approx(scores, abs=1e-4)
