"""A shard builds its model for what it will be asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes.paged_logits import paged_logits
from tests.server.models.families import FAMILIES, VOCAB_SIZE, reference_logits, write_model
from tgi.model_config import read_model_config
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import SingleRank
from tgi.server.platforms.detect import platform_of
from tgi.server.resolve import ServeArgs, resolve
from tgi.server.serve import _load

TRAINED = 32  # tokens, of the row below


@pytest.mark.slow
@pytest.mark.row("E: Rope variants")
def test_factors_of_a_longrope_are_those_of_the_served_length(tmp_path: Path) -> None:
    """transformers chooses by the length of a text: this one fits into what was trained."""
    (row,) = (row for row in FAMILIES if row.name == "phi3-longrope")
    reference = write_model(row, tmp_path)
    ids = torch.randint(VOCAB_SIZE, (TRAINED - 2,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = reference_logits(reference, ids)

    def served(max_total_tokens: int | None) -> torch.Tensor:
        environment = {"ATTENTION": "torch"}
        if max_total_tokens is not None:
            environment["MAX_TOTAL_TOKENS"] = str(max_total_tokens)
        args = ServeArgs(model_id="m", dtype="float32")
        config = resolve(args, tmp_path, platform_of("cpu"), environment)
        model = _load(config, read_model_config(tmp_path), SingleRank(), torch.device("cpu")).model
        return paged_logits(model, TorchBackend("torch", 16), [ids])[0]

    torch.testing.assert_close(served(TRAINED), expected, rtol=0, atol=row.tolerance)
    for longer in (TRAINED + 1, None):
        assert float((served(longer) - expected).abs().max()) > 100 * row.tolerance
