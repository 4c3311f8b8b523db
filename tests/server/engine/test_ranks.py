from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_model import write_tiny_llama

ROOT = Path(__file__).parents[3]
REQUESTS = [[[5, 6, 7], 12], [list(range(40, 90)), 9], [[300], 16]]


def run(model: Path, world: int) -> list[list[int]]:
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
    return json.loads(outputs[0][0])


@pytest.mark.slow
def test_two_ranks_answer_like_one_though_they_round_differently(tmp_path: Path) -> None:
    """Rank 0 alone chooses; its ids reach the others by a broadcast, so no rank's own rounding can lead it astray."""
    model = write_tiny_llama(tmp_path / "tiny")
    alone = run(model, 1)
    assert [len(ids) for ids in alone] == [count for _, count in REQUESTS]
    assert run(model, 2) == alone
