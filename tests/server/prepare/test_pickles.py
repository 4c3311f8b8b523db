"""Pickled weights become safetensors once; nothing that a file asks for is run."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tgi import hub
from tgi.errors import StartupError
from tgi.server.prepare.command import prepare
from tgi.server.prepare.pickles import convert_pickles, read_pickle, without_shared

EMBEDDING = torch.arange(12.0).view(4, 3)


def model(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, value in files.items():
        torch.save(value, folder / name)
    return folder


def test_one_file_in_its_dtypes(tmp_path: Path) -> None:
    tensors = {"a": EMBEDDING, "b": EMBEDDING.bfloat16() + 1, "c": torch.tensor([1, 2])}
    folder = model(tmp_path / "m", **{"pytorch_model.bin": tensors})
    assert hub.find(str(folder), source={}) is None
    assert prepare(str(folder), convert=True, source={}) == folder
    found = load_file(folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert hub.find(str(folder), source={}) == folder
    assert not list(folder.glob(".preparing*"))


def test_several_files_get_an_index(tmp_path: Path) -> None:
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    folder = model(tmp_path / "m", **{names[0]: {"a": EMBEDDING}, names[1]: {"b": EMBEDDING + 1}})
    convert_pickles(folder)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert torch.equal(load_file(folder / weight_map["b"])["b"], EMBEDDING + 1)


def test_it_is_done_only_when_allowed(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", **{"pytorch_model.bin": {"a": EMBEDDING}})
    with pytest.raises(StartupError, match="converted when you allow it with --trust-remote-code or --auto-convert"):
        prepare(str(folder), source={})
    assert not list(folder.glob("*.safetensors"))


def test_shared_tensors_keep_one_name(tmp_path: Path) -> None:
    storage = torch.arange(8.0)
    shared = {"lm_head.weight": EMBEDDING, "model.embed_tokens.weight": EMBEDDING, "x": storage[:4], "y": storage[2:]}
    kept, dropped = without_shared(shared | {"empty": torch.zeros(0), "none": torch.zeros(0), "t": EMBEDDING.T})
    assert dropped == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(kept) == {"model.embed_tokens.weight", "x", "y", "empty", "none", "t"}
    assert torch.equal(kept["y"], storage[2:]) and torch.equal(kept["t"], EMBEDDING.T)
    folder = model(tmp_path / "m", **{"pytorch_model.bin": shared})
    convert_pickles(folder)
    assert set(load_file(folder / "model.safetensors")) == {"model.embed_tokens.weight", "x", "y"}


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_wrapped_weights(tmp_path: Path, wrapper: str) -> None:
    file = tmp_path / "w.pt"
    torch.save({wrapper: {"a": EMBEDDING}, "epoch": 3}, file)
    assert set(read_pickle(file)) == {"a"}


def test_the_old_format_is_read(tmp_path: Path) -> None:
    torch.save({"a": EMBEDDING}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_pickle(tmp_path / "old.bin")["a"], EMBEDDING)


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("plain", [False, True])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, plain: bool) -> None:
    mark, file = tmp_path / "ran", tmp_path / "m" / "pytorch_model.bin"
    folder = model(tmp_path / "m")
    content = {"a": EMBEDDING, "evil": Malicious(mark)}
    if plain:
        file.write_bytes(pickle.dumps(Malicious(mark)))
    else:
        torch.save(content, file)
    with pytest.raises(StartupError) as raised:
        prepare(str(folder), convert=True, source={})
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "would run code" in str(raised.value) or plain
    assert "weights_only" not in str(raised.value)  # torch's advice to trust the file is not ours
    assert not mark.exists()
    assert {entry.name for entry in folder.iterdir()} == {"config.json", "pytorch_model.bin"}


def compressed(file: Path) -> None:
    """A few bytes that become many."""
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.filterwarnings("ignore")  # torch's own, of prototypes
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.zeros(1).expand(10**6, 10**6), "would take 4000000000000 bytes"),
        (lambda: torch.eye(3).to_sparse(), "does not simply hold its numbers"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "does not simply hold its numbers"),
        (lambda: torch.empty(10**15, device="meta"), "does not simply hold its numbers"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "does not simply hold its numbers"),
    ],
)
def test_tensors_that_are_no_weights(tmp_path: Path, make: Callable[[], torch.Tensor], told: str) -> None:
    folder = model(tmp_path / "m", **{"pytorch_model.bin": {"fine": EMBEDDING, "odd": make()}})
    with pytest.raises(StartupError, match=rf"pytorch_model\.bin is refused: its tensor 'odd' {told}"):
        convert_pickles(folder)
    assert {entry.name for entry in folder.iterdir()} == {"config.json", "pytorch_model.bin"}


def test_a_name_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"its tensor 'a\\ud800' has no name that can be written"):
        convert_pickles(model(tmp_path / "m", **{"pytorch_model.bin": {"a\ud800": EMBEDDING}}))


def test_small_tensors_may_repeat_their_numbers(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", **{"pytorch_model.bin": {"a": torch.arange(3).expand(2, 3), "b": EMBEDDING.T}})
    convert_pickles(folder)
    found = load_file(folder / "model.safetensors")
    assert torch.equal(found["a"], torch.arange(3).expand(2, 3)) and torch.equal(found["b"], EMBEDDING.T)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def nothing(file: Path) -> None:
    file.write_bytes(b"")


def no_tensors(file: Path) -> None:
    torch.save({"epoch": 3}, file)


def a_list(file: Path) -> None:
    torch.save([EMBEDDING], file)


@pytest.mark.parametrize("spoil", [cut, nothing, no_tensors, a_list, compressed])
def test_broken_files(tmp_path: Path, spoil: Any) -> None:
    folder = model(tmp_path / "m", **{"pytorch_model.bin": {"a": EMBEDDING}})
    spoil(folder / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"pytorch_model\.bin (cannot be read|holds no named tensors)") as raised:
        convert_pickles(folder)
    assert "\n" not in str(raised.value)


def test_a_missing_part_and_a_tensor_twice(tmp_path: Path) -> None:
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    folder = model(tmp_path / "m", **{names[0]: {"a": EMBEDDING}})
    with pytest.raises(StartupError, match=r"lacks pytorch_model-00002-of-00002\.bin"):
        convert_pickles(folder)
    torch.save({"a": EMBEDDING}, folder / names[1])
    with pytest.raises(StartupError, match="holds the tensor a of another file a second time"):
        convert_pickles(folder)
    assert not list(folder.glob("*.safetensors*"))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "m", **{"pytorch_model.bin": {"a": EMBEDDING}})

    def refuse(**_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(StartupError, match=r"cannot be written .*Permission denied"):
        convert_pickles(folder)
