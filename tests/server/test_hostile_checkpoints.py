"""A wrong or hostile checkpoint ends the shard's own program with one line and a code, and runs nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_model import write_tiny_llama

PROGRAM = Path(sys.executable).with_name("text-generation-server")
UP = "model.layers.1.mlp.up_proj.weight"


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(PROGRAM), *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def missing_shard(path: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def missing_tensor(path: Path) -> None:
    change(path, lambda tensors: tensors.__delitem__(UP))


def wrong_shape(path: Path) -> None:
    change(path, lambda tensors: tensors.update({UP: tensors[UP][:-1].clone()}))


def extra_tensor(path: Path) -> None:
    change(path, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}))


def not_a_number(path: Path) -> None:
    change(path, lambda tensors: tensors[UP].view(-1).__setitem__(7, torch.nan))


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def configured(**changes: object) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))

    return spoil


def nested_too_deep(path: Path) -> None:
    (path / "config.json").write_text('{"a":' * 100_000)


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def pickled(path: Path) -> None:
    (path / "model.safetensors").unlink()
    torch.save({"a": torch.ones(2), "b": Malicious(path / "ran")}, path / "pytorch_model.bin")


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """What was said at level ERROR: one line, no traceback."""
    assert done.returncode == 1, done
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "Error: " in line]
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (missing_shard, "lacks model-00002-of-00002.safetensors"),
        (missing_tensor, f"holds no tensor {UP}"),
        (wrong_shape, "has shape [127, 64], the model's configuration asks for [128, 64]"),
        (extra_tensor, "for which the model's configuration has no place"),
        (not_a_number, f"The weights of {UP} hold values that are no finite numbers"),
        (truncated, "model.safetensors cannot be read"),
        (
            configured(quantization_config={"quant_method": "gptq", "bits": 4}),
            "quantised with 'gptq', which is not supported",
        ),
        (pickled, "must be converted to safetensors"),
        (nested_too_deep, "config.json cannot be read: maximum recursion depth exceeded"),
        (configured(num_hidden_layers=10**9), "holds no tensor model.layers.2.input_layernorm.weight"),
        (configured(vocab_size=10**13), "model's configuration asks for [10000000000000, 64]"),
        (configured(intermediate_size=10**13), "model's configuration asks for [10000000000000, 64]"),
    ],
)
def test_serving_it_ends_with_one_line(tmp_path: Path, spoil: Callable[[Path], None], told: str) -> None:
    path = write_tiny_llama(tmp_path / "model")
    spoil(path)
    done = run("serve", path, "--dtype", "float32", "--uds-path", tmp_path / "shard", folder=tmp_path)
    assert told in only_line(done)
    assert not (path / "ran").exists()


@pytest.mark.slow
def test_converting_a_pickle_with_code_ends_with_one_line(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model")
    pickled(path)
    assert "only as pickled files" in only_line(run("download-weights", path, folder=tmp_path))
    allowed = run("download-weights", path, "--trust-remote-code", folder=tmp_path)
    assert "loading that would run code" in only_line(allowed)
    assert not (path / "ran").exists()
    assert not (path / "model.safetensors").exists()
