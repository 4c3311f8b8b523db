"""A process that loads a model as a shard does and prints the most anonymous memory that it ever had.

Run as `python load_program.py MODEL DTYPE`. Bytes; Linux only.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from tgi.model_config import read_model_config
from tgi.server.distributed.group import make_group
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

EVERY_S = 0.005


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def main(path: Path, dtype: torch.dtype) -> None:
    peak, done = anonymous_bytes(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(EVERY_S):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    device = torch.device("cpu")
    checkpoint = TrackedCheckpoint(open_checkpoint(path))
    model = build_model(read_model_config(path), checkpoint, dtype, device, make_group(0, 1, "localhost", 0, device))
    checkpoint.check_all_read()
    checkpoint.close()
    done.set()
    watcher.join()
    print(max(peak, anonymous_bytes()))
    del model


if __name__ == "__main__":
    main(Path(sys.argv[1]), getattr(torch, sys.argv[2]))
