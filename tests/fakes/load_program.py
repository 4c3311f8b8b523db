"""A process that loads a model as a shard does and prints the most anonymous memory that it ever had.

Run as `python load_program.py MODEL DTYPE RANK RANKS PORT`. Bytes; Linux only.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from tgi.model_config import read_model_config
from tgi.server.distributed.group import make_group
from tgi.server.models.registry import build_model
from tgi.server.weights import allocation
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

EVERY_S = 0.005


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def main(path: Path, dtype: torch.dtype, rank: int, ranks: int, port: int) -> None:
    device = torch.device("cpu")
    group = make_group(rank, ranks, "localhost", port, device)
    peak, done = anonymous_bytes(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(EVERY_S):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    checkpoint = TrackedCheckpoint(open_checkpoint(path))
    with allocation.apart():
        model = build_model(read_model_config(path), checkpoint, dtype, device, group)
    checkpoint.check_all_read()
    checkpoint.close()
    done.set()
    watcher.join()
    print(max(peak, anonymous_bytes()))
    del model
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), getattr(torch, sys.argv[2]), *map(int, sys.argv[3:]))
