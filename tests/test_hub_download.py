"""Downloads from a hub that speaks the real one's HTTP API: what is fetched, resumed, refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.fakes.hub_server import LARGE, SHA, Hub, Repository, running_hub
from tgi import hub
from tgi.errors import StartupError

CHUNK = 1 << 16  # bytes that the hub's client writes at once
LARGE_FILE = bytes(range(256)) * 1024  # four chunks


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    with running_hub() as server:
        yield server


@pytest.fixture
def source(served: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": served.address}


def offer(served: Hub, *names: str, **files: bytes) -> Repository:
    repository = Repository({"config.json": b"{}", **dict.fromkeys(names, b"x"), **files})
    served.repositories["org/model"] = repository
    return repository


def index(**weight_map: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


@pytest.mark.row("C: Download / safetensors conversion")
def test_only_what_is_needed_is_fetched(served: Hub, source: dict[str, str]) -> None:
    needed = [
        *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
        *("special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja", "model.safetensors"),
        "additional_chat_templates/tool_use.jinja",
    ]
    left = [
        *("pytorch_model.bin", "model.h5", "README.md", "training_args.bin", "training_args.json", "onnx/config.json"),
        *("assets/a.json", "adapter/config.json", "1_Pooling/config.json", "model.onnx", "model.gguf"),
        *("original/consolidated.00.pth", "consolidated.safetensors", "flax_model.msgpack", "modeling_own.py"),
        *("checkpoint-1/model.safetensors", "medusa_lm_head.safetensors", "optimizer.bin", "model-q8.safetensors"),
    ]
    offer(served, *needed, *left)
    path = hub.download("org/model", source=source)
    assert sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()) == sorted(
        ["config.json", *needed]
    )
    assert path == hub.locate("org/model", "main", source) == hub.locate("org/model", SHA, source)


def test_a_second_time_nobody_is_asked(served: Hub, source: dict[str, str]) -> None:
    offer(served, "model.safetensors")
    path = hub.download("org/model", source=source)
    asked = len(served.requests)
    assert hub.download("org/model", source={**source, "HF_HUB_OFFLINE": "1"}) == path
    assert len(served.requests) == asked


def test_an_index_says_what_is_fetched(served: Hub, source: dict[str, str]) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {"model.safetensors.index.json": index(a=shards[0], b=shards[1])}
    offer(served, *shards, "model.safetensors", "other.safetensors", **weight_map)
    path = hub.download("org/model", source=source)
    assert sorted(file.name for file in path.glob("*.safetensors")) == shards


def test_a_shard_that_the_index_names_and_the_hub_lacks(served: Hub, source: dict[str, str]) -> None:
    offer(served, "a.safetensors", **{"model.safetensors.index.json": index(x="a.safetensors", y="b.safetensors")})
    with pytest.raises(StartupError, match=r"org/model lacks b\.safetensors of its weights"):
        hub.download("org/model", source=source)
    assert "a.safetensors" not in served.fetched()


@pytest.mark.parametrize("name", ["../../../escaped.safetensors", "/etc/escaped.safetensors", "sub/x.safetensors"])
def test_an_index_that_leads_out_of_the_folder(served: Hub, source: dict[str, str], name: str) -> None:
    offer(served, "a.safetensors", **{"model.safetensors.index.json": index(x=name)})
    with pytest.raises(StartupError, match="which is no file beside it; do not use this model"):
        hub.download("org/model", source=source)


def test_a_listing_that_leads_out_of_the_folder(served: Hub, source: dict[str, str], tmp_path: Path) -> None:
    offer(served, "../../../../escaped.json", "../escaped.safetensors", "../escaped.gguf")
    with pytest.raises(StartupError):
        hub.download("org/model", source=source)
    assert not list(tmp_path.rglob("escaped*"))


def test_pickles_are_fetched_only_when_allowed(served: Hub, source: dict[str, str]) -> None:
    shards = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    offer(served, *shards, "training_args.bin", **{"pytorch_model.bin.index.json": index(a=shards[0], b=shards[1])})
    with pytest.raises(StartupError, match=r"only as pickled files \(pytorch_model-00001-of-00002\.bin\).*--trust-rem"):
        hub.download("org/model", source=source)
    assert not set(shards) & set(served.fetched())
    path = hub.download("org/model", source=source, pickles=True)
    assert sorted(file.name for file in path.glob("*.bin")) == shards
    assert hub.find("org/model", source=source) is None
    with pytest.raises(StartupError, match=r"must be converted to safetensors\. Do so with: .*--trust-remote-code"):
        hub.locate("org/model", source=source)


def test_an_adapter_alone_is_fetched_as_one(served: Hub, source: dict[str, str]) -> None:
    served.repositories["org/model"] = Repository(
        {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x", "adapter_model.bin": b"x"}
    )
    path = hub.download("org/model", source=source)
    assert {file.name for file in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(StartupError, match=r"must be merged into its base model\. Do so with: .*--merge-lora"):
        hub.locate("org/model", source=source)


QUANTS = ("Model-Q4_K_M.gguf", "Model-Q4_K_S.gguf", "Model-Q8_0.gguf", "mmproj-Model-f16.gguf", "imatrix.gguf")


@pytest.mark.parametrize("quant", ["Q4_K_M", "q4_k_m"])
def test_a_quantisation_picks_its_gguf_file(served: Hub, source: dict[str, str], quant: str) -> None:
    offer(served, *QUANTS, "model.safetensors")
    path = hub.download(f"org/model:{quant}", source=source)
    assert path.name == "Model-Q4_K_M.gguf"
    assert [name for name in served.fetched() if name.endswith((".gguf", ".safetensors"))] == ["Model-Q4_K_M.gguf"]
    assert hub.locate(f"org/model:{quant}", source=source) == path
    with pytest.raises(StartupError, match="is not on this machine"):
        hub.locate("org/model:Q8_0", source=source)


def test_which_gguf_file_must_be_said(served: Hub, source: dict[str, str]) -> None:
    offer(served, *QUANTS)
    for model_id in ("org/model", "org/model:Q2_K"):
        with pytest.raises(StartupError, match=r"one of Q4_K_M, Q4_K_S, Q8_0 as --model-id org/model:Q4_K_M"):
            hub.download(model_id, source=source)
    with pytest.raises(StartupError, match="is neither a local path nor a hub id"):
        hub.download("org/model:", source=source)


def test_the_only_gguf_file_needs_no_name(served: Hub, source: dict[str, str]) -> None:
    offer(served, "Model-Q8_0.gguf", "mmproj-Model.gguf")
    path = hub.download("org/model", source=source)
    assert path.name == "Model-Q8_0.gguf"
    assert hub.locate("org/model", source=source) == path


def test_a_split_gguf_comes_whole(served: Hub, source: dict[str, str]) -> None:
    parts = [f"BF16/Model-BF16-0000{number}-of-00002.gguf" for number in (1, 2)]
    offer(served, *parts, "Model-Q8_0.gguf")
    path = hub.download("org/model:BF16", source=source)
    assert path.as_posix().endswith(parts[0])
    assert path.with_name("Model-BF16-00002-of-00002.gguf").is_file()
    path.with_name("Model-BF16-00002-of-00002.gguf").unlink()
    assert hub.find("org/model:BF16", source=source) is None


def test_a_cut_connection_is_resumed(served: Hub, source: dict[str, str]) -> None:
    offer(served, **{"model.safetensors": LARGE_FILE})
    served.cut_after = 2 * CHUNK + 100
    path = hub.download("org/model", source=source)
    assert (path / "model.safetensors").read_bytes() == LARGE_FILE
    assert served.ranges("model.safetensors") == [None, f"bytes={2 * CHUNK}-"]


def test_a_second_try_keeps_the_files_that_came_whole(served: Hub, source: dict[str, str]) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {"model.safetensors.index.json": index(a=shards[0], b=shards[1])}
    offer(served, shards[0], **weight_map, **{shards[1]: LARGE_FILE})
    served.cut_after, served.gone_after_cut = 100, True
    with pytest.raises(StartupError, match=r"failed: .*that have come whole are kept"):
        hub.download("org/model", source=source)
    assert hub.find("org/model", source=source) is None
    served.cut_after, served.gone_after_cut = None, False
    path = hub.download("org/model", source=source)
    assert (path / shards[1]).read_bytes() == LARGE_FILE
    assert served.fetched().count(shards[0]) == 1


def test_a_revision_is_fetched_by_name(served: Hub, source: dict[str, str]) -> None:
    offer(served, "model.safetensors").revisions = ("main", "refs/pr/1")
    path = hub.download("org/model", "refs/pr/1", source)
    assert hub.locate("org/model", "refs/pr/1", source) == path
    with pytest.raises(StartupError, match=r"^The model org/model has no revision v9\. Check --revision$"):
        hub.download("org/model", "v9", source)


@pytest.mark.row("C: Revision, HF_TOKEN, offline, cache variables")
def test_a_gated_model_needs_the_token(served: Hub, source: dict[str, str]) -> None:
    offer(served, "model.safetensors").gated = True
    for token in ({}, {"HF_TOKEN": "hf_wrong"}):
        with pytest.raises(
            StartupError, match=r"is gated: accept its terms at http://127.*/org/model and set HF_TOKEN"
        ):
            hub.download("org/model", source=source | token)
    assert hub.download("org/model", source=source | {"HF_API_TOKEN": served.token}).name == SHA


def test_offline_asks_nobody(served: Hub, source: dict[str, str]) -> None:
    offer(served, "model.safetensors")
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE forbids fetching it"):
        hub.download("org/model", source={**source, "HF_HUB_OFFLINE": "1"})
    assert served.requests == []


def without_weights(served: Hub) -> None:
    offer(served)


def without_config(served: Hub) -> None:
    del offer(served, "model.safetensors").files["config.json"]


def broken_index(served: Hub) -> None:
    offer(served, "a.safetensors", **{"model.safetensors.index.json": b"<html>"})


def busy(served: Hub) -> None:
    offer(served, "model.safetensors")
    served.status = 500


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (lambda served: None, "The hub has no model org/model, or it is private"),
        (without_weights, "has no safetensors and no GGUF weights"),
        (without_config, r"has no config\.json with complete weights"),
        (broken_index, "is not an index of weights"),
        (busy, "Fetching org/model into .* failed: .*500"),
    ],
)
def test_every_failure_is_one_line(
    served: Hub, source: dict[str, str], arrange: Callable[[Hub], None], message: str
) -> None:
    arrange(served)
    with pytest.raises(StartupError, match=message) as raised:
        hub.download("org/model", source=source)
    assert "\n" not in str(raised.value)


def test_a_hub_that_does_not_answer(served: Hub, source: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    offer(served, "model.safetensors")
    served.hold = threading.Event()
    monkeypatch.setattr(hub, "CONTACT_S", 0.1)
    with pytest.raises(StartupError, match="Cannot reach the hub to fetch org/model"):
        hub.download("org/model", source=source)


def test_no_hub_at_all(served: Hub, source: dict[str, str]) -> None:
    with pytest.raises(StartupError, match="Cannot reach the hub to fetch org/model"):
        hub.download("org/model", source={**source, "HF_ENDPOINT": "http://127.0.0.1:9"})


def test_large_files_lie_behind_a_redirect(served: Hub, source: dict[str, str]) -> None:
    offer(served, **{"model.safetensors": bytes(LARGE)})
    path = hub.download("org/model", source={**source, "HF_TOKEN": served.token})
    assert (path / "model.safetensors").stat().st_size == LARGE
    (elsewhere,) = [headers for _, path, headers in served.requests if path.startswith("/cdn/")]
    assert "authorization" not in {name.lower() for name in elsewhere}  # the token is the hub's alone
