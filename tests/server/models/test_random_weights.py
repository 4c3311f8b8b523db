"""Every family runs from its configuration alone (`--load-format dummy`), and from files reads all that they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes.paged_logits import paged_logits
from tests.server.models.families import FAMILIES, SIZES, Family, write_model
from tgi.model_config import read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import make_group
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.dummy_checkpoint import DummyCheckpoint
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint

CPU = torch.device("cpu")


@pytest.mark.slow  # transformers makes the configurations
@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_a_family_runs_without_files(row: Family, tmp_path: Path) -> None:
    import transformers

    settings = {**(SIZES if row.sizes else {}), **row.settings}
    getattr(transformers, row.config)(**settings).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    model = build_model(
        config, DummyCheckpoint(torch.float32, CPU), torch.float32, CPU, make_group(0, 1, "localhost", 0, CPU)
    )
    (logits,) = paged_logits(model, TorchBackend(), [[1, 2, 3, 4, 5]])
    assert logits.shape == (5, config.vocab_size)
    assert logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_a_family_leaves_no_tensor_unread(row: Family, tmp_path: Path) -> None:
    write_model(row, tmp_path)
    config, checkpoint = read_model_config(tmp_path), TrackedCheckpoint(open_checkpoint(tmp_path))
    build_model(config, checkpoint, torch.float32, CPU, make_group(0, 1, "localhost", 0, CPU))
    checkpoint.check_all_read(config.num_layers if config.raw.get("num_nextn_predict_layers") else None)
