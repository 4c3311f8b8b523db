"""Mixtures of experts in the words of well-known repositories, against transformers on random weights.

`tests/data/hub_expert_configs.jsonl` has a line for each: the keys of its config.json (sizes shrunk, dropout and the
like left out). Tensors have the names of the hub's files: transformers saves them so, whatever it has in memory.

    like     a configuration of the same model that transformers reads as it was meant, where it does not the file's
    longest  tokens of a request, where rope goes by length
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.fakes.paged_logits import paged_logits
from tests.server.models.families import LOGIT_DEVIATION, redraw, reference_logits
from tgi.model_config import LEFT_OUT, read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import SingleRank
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

CPU = torch.device("cpu")
ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "hub_expert_configs.jsonl").read_text().splitlines()
]
PROMPT = torch.randint(200, (40,), generator=torch.Generator().manual_seed(5)).tolist()
# Of the last layer, in the checkpoint: what the hub calls the first expert's first tensor, or the stack.
FIRST = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.0.w1.weight",
    "phimoe": "model.layers.1.block_sparse_moe.experts.0.w1.weight",
    "dbrx": "transformer.blocks.1.ffn.experts.mlp.w1",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj",
}


@pytest.mark.parametrize("row", [pytest.param(row, id=row["repository"]) for row in ROWS])
def test_a_repository_gives_the_numbers_of_transformers(tmp_path: Path, row: dict[str, Any]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(row.get("like") or row["config"]))
    torch.manual_seed(0)
    settings = AutoConfig.from_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="eager").eval()
    redraw(reference, LOGIT_DEVIATION)
    reference.save_pretrained(tmp_path)
    file.write_text(json.dumps(row["config"]))
    config = read_model_config(tmp_path)
    checkpoint = TrackedCheckpoint(open_checkpoint(tmp_path))
    assert FIRST.get(config.model_type, "model.layers.1.mlp.experts.0.gate_proj.weight") in checkpoint.names()
    model = build_model(config, checkpoint, torch.float32, CPU, SingleRank(), row.get("longest"))
    checkpoint.check_all_read()
    checkpoint.close()
    (logits,) = paged_logits(model, TorchBackend("torch", 16), [PROMPT])
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "falcon_mamba", "mamba"])
def test_what_a_file_leaves_out_is_as_in_transformers(model_type: str) -> None:
    theirs = CONFIG_MAPPING[model_type]()
    assert LEFT_OUT[model_type] == {name: getattr(theirs, name) for name in LEFT_OUT[model_type]}
