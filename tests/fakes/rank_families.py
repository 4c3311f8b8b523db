"""One rank of many tiny models, in turn: `python -m tests.fakes.rank_families RANK WORLD PORT JOB DEVICE`.

DEVICE is cpu (over gloo) or cuda (over NCCL, a device for each rank). JOB is a file with a list of {path,
sequences}; rank 0 writes the logits of a model's sequences to `ranks.npz` in its folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from tests.fakes.paged_logits import paged_logits
from tgi.model_config import read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import make_group
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint


def main() -> None:
    rank, world, port, job = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    device = torch.device("cuda", rank) if sys.argv[5] == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = make_group(rank, world, "localhost", port, device)
    for model in json.loads(job.read_text()):
        path = Path(model["path"])
        checkpoint = open_checkpoint(path)
        built = build_model(read_model_config(path), checkpoint, torch.float32, device, group)
        checkpoint.close()
        logits = paged_logits(built, TorchBackend("torch", 16), model["sequences"], device=device)
        if rank == 0:
            np.savez((path if path.is_dir() else path.parent) / "ranks.npz", *(part.numpy() for part in logits))
    group.close()


if __name__ == "__main__":
    main()
