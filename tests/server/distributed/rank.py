"""One rank of a two-rank test, run by itself: `python rank.py RANK PORT MODEL OUT`. Writes what it computed to OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.fakes.contiguous_attention import greedy_ids, prompt_logits
from tgi.model_config import read_model_config
from tgi.server.distributed.group import make_group
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint

PROMPT = [5, 77, 300, 12, 511, 42, 9]


def main(rank: int, port: int, path: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    group = make_group(rank, 2, "127.0.0.1", port, "cpu", timeout_s=30)
    total = group.all_reduce_(torch.tensor([1.0, 10.0]) * (rank + 1))
    half = group.all_reduce_(torch.full((3,), 0.5 + rank, dtype=torch.bfloat16))
    columns = group.all_gather(torch.arange(6.0).view(2, 3) + 100 * rank)
    rows = group.all_gather(torch.arange(6.0).view(3, 2).T + 100 * rank, dim=0)
    told = group.broadcast_(torch.tensor([7, 8]) if rank == 0 else torch.zeros(2, dtype=torch.int64))
    model = build_model(read_model_config(path), open_checkpoint(path), torch.float32, torch.device("cpu"), group)
    result = {
        "total": total.tolist(),
        "half": half.tolist(),
        "columns": columns.tolist(),
        "rows": rows.tolist(),
        "told": told.tolist(),
        "heads": [model.cache_shape.num_heads, model.cache_shape.num_kv_heads],
        "logits": prompt_logits(model, PROMPT).tolist(),
        "greedy": greedy_ids(model, PROMPT, 8),
    }
    group.close()
    group.close()
    return result


if __name__ == "__main__":
    rank, port, path, out = sys.argv[1:]
    Path(out).write_text(json.dumps(main(int(rank), int(port), Path(path))))
