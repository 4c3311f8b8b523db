"""A shard builds its model for what it will be asked."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.paged_logits import paged_logits
from tests.fakes.tiny_model import write_tiny_llama
from tests.server.models.families import FAMILIES, VOCAB_SIZE, Family, family, reference_logits, write_model
from tgi.errors import StartupError
from tgi.model_config import read_model_config
from tgi.server import serve
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.distributed.group import SingleRank
from tgi.server.grammar.vocabulary import Vocabulary
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


@pytest.mark.slow
@pytest.mark.row("C: Rope scaling flags")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_scaling_given_at_start_takes_the_place_of_the_models_own(tmp_path: Path, name: str) -> None:
    row = family(name)
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    scaling = {**row.settings["rope_parameters"], "full_attention": linear} if name == "gemma3_text" else linear
    stretched = dataclasses.replace(row, settings={**row.settings, "rope_parameters": scaling})
    ids = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = reference_logits(write_model(stretched, tmp_path / "stretched"), ids)
    own = tmp_path / "own"
    write_model(dataclasses.replace(row, settings=_with_theta(row, linear["rope_theta"])), own)  # the same weights
    environment = {"ATTENTION": "torch", "ROPE_SCALING": "linear", "ROPE_FACTOR": "4"}
    config = resolve(ServeArgs(model_id="m", dtype="float32"), own, platform_of("cpu"), environment)
    model = _load(config, read_model_config(own), SingleRank(), torch.device("cpu")).model
    (logits,) = paged_logits(model, TorchBackend("torch", 16), [ids])
    torch.testing.assert_close(logits, expected, rtol=0, atol=row.tolerance)


def _with_theta(row: Family, theta: object) -> dict[str, Any]:
    rope = row.settings["rope_parameters"]
    if "full_attention" in rope:
        return {
            **row.settings,
            "rope_parameters": {**rope, "full_attention": {**rope["full_attention"], "rope_theta": theta}},
        }
    return dict(row.settings)


def test_a_scaling_that_transformers_would_not_take_is_refused(tmp_path: Path) -> None:
    settings = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "arcee", **settings}))
    environment = {"ATTENTION": "torch", "ROPE_FACTOR": "4"}
    config = resolve(ServeArgs(model_id="m", load_format="dummy"), tmp_path, platform_of("cpu"), environment)
    with pytest.raises(StartupError, match=r"^ROPE_SCALING: 'arcee' is served through transformers"):
        _load(config, read_model_config(tmp_path), SingleRank(), torch.device("cpu"))


def test_a_start_that_fails_waits_for_the_thread_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which runs native code: it crashed when the interpreter ended under it."""
    path = write_tiny_llama(tmp_path / "model")
    (path / "model.safetensors").unlink()
    vocabulary: Future[Vocabulary] = Future()
    waited: list[Future[Vocabulary]] = []
    monkeypatch.setattr(serve, "read_beside", lambda *_: vocabulary)
    monkeypatch.setattr(serve, "wait", lambda futures, timeout: waited.extend(futures))
    platform = platform_of("cpu")
    config = resolve(ServeArgs(model_id="m", dtype="float32"), path, platform, {})
    with pytest.raises(StartupError, match=r"holds no \*\.safetensors"):
        serve._serve_rank(config, SingleRank(), torch.device("cpu"), platform, [], None)
    assert waited == [vocabulary]
