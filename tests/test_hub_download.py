"""Downloads from a hub that speaks the real one's HTTP API: what is fetched, resumed, refused."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.hub_server import LARGE, SHA, Hub, Repository, running_hub
from tgi import hub, transfer
from tgi.errors import StartupError

CHUNK = 1 << 16  # bytes that are written at once
LARGE_FILE = bytes(range(256)) * 1024  # four chunks


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(transfer, "BLOCK_BYTES", CHUNK)
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.0)
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
    assert not list(path.parents[1].rglob("*.incomplete"))


PROGRAM = Path(sys.executable).with_name("text-generation-server")
BIG = os.urandom(1 << 20) * 8  # eight of the blocks that a process writes at once


def start(source: dict[str, str], *arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], **source}
    command = [str(PROGRAM), "download-weights", "org/model", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options
    )


def blobs(source: dict[str, str]) -> list[Path]:
    return sorted((hub.cache_directory(source) / "models--org--model" / "blobs").iterdir())


def killed_midway(served: Hub, source: dict[str, str]) -> int:
    """Bytes of the large file that a killed download has left behind."""
    served.stuck_after = (5 << 20) + 100
    first = start(source)
    assert served.stuck.wait(60)
    partial = hub.cache_directory(source) / "models--org--model" / "blobs"
    while not any(file.stat().st_size >= 5 << 20 for file in partial.glob("*.incomplete")):
        assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    return 5 << 20


@pytest.mark.timeout(120)
def test_another_process_goes_on_where_a_killed_one_was(served: Hub, source: dict[str, str]) -> None:
    offer(served, **{"model.safetensors": BIG})
    have = killed_midway(served, source)
    assert hub.find("org/model", source=source) is None
    second = start(source)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 0, said
    assert served.ranges("model.safetensors") == [None, f"bytes={have}-"]
    path = hub.locate("org/model", source=source)
    assert (path / "model.safetensors").read_bytes() == BIG
    assert not [file for file in blobs(source) if file.suffix == ".incomplete"]


def leave_half(served: Hub, source: dict[str, str], content: bytes) -> None:
    """What a download that was killed would leave."""
    offer(served, "a.json", **{"model.safetensors": content})
    served.cut_after, served.gone_after_cut = 2 * CHUNK, True
    with pytest.raises(StartupError, match="what has come is kept"):
        hub.download("org/model", source=source)
    served.cut_after, served.gone_after_cut = None, False
    assert [file.stat().st_size for file in blobs(source) if file.suffix == ".incomplete"] == [2 * CHUNK]
    served.requests.clear()


def test_a_file_that_has_changed_meanwhile_comes_from_its_beginning(served: Hub, source: dict[str, str]) -> None:
    leave_half(served, source, LARGE_FILE)
    served.repositories["org/model"].files["model.safetensors"] = LARGE_FILE[::-1]
    path = hub.download("org/model", source=source)
    assert (path / "model.safetensors").read_bytes() == LARGE_FILE[::-1]
    assert served.ranges("model.safetensors") == [None]


def test_a_server_without_ranges_sends_it_all_again(served: Hub, source: dict[str, str]) -> None:
    leave_half(served, source, LARGE_FILE)
    served.no_ranges = True
    path = hub.download("org/model", source=source)
    assert (path / "model.safetensors").read_bytes() == LARGE_FILE
    assert served.ranges("model.safetensors") == [f"bytes={2 * CHUNK}-"]


@pytest.mark.parametrize("spoiled", [b"x" * 100, b"x" * 2 * CHUNK, LARGE_FILE[::-1], bytes(2 * len(LARGE_FILE))])
def test_a_part_that_is_wrong_is_thrown_away(served: Hub, source: dict[str, str], spoiled: bytes) -> None:
    leave_half(served, source, LARGE_FILE)
    next(file for file in blobs(source) if file.suffix == ".incomplete").write_bytes(spoiled)
    path = hub.download("org/model", source=source)
    assert (path / "model.safetensors").read_bytes() == LARGE_FILE


@pytest.mark.parametrize("sent", [LARGE_FILE[:-1] + b"x", LARGE_FILE + b"x"])
def test_content_that_was_not_announced_is_refused(served: Hub, source: dict[str, str], sent: bytes) -> None:
    offer(served, **{"model.safetensors": LARGE_FILE})
    served.sent["model.safetensors"] = sent
    with pytest.raises(StartupError, match=r"failed: model\.safetensors does not have the content that the hub announ"):
        hub.download("org/model", source=source)
    assert hub.find("org/model", source=source) is None
    served.sent.clear()
    assert (hub.download("org/model", source=source) / "model.safetensors").read_bytes() == LARGE_FILE


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_processes_at_once_share_the_work(served: Hub, source: dict[str, str]) -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    files = {name: BIG[number:] for number, name in enumerate(shards)}
    offer(served, **files, **{"model.safetensors.index.json": index(a=shards[0], b=shards[1], c=shards[2])})
    for process in [start(source), start(source)]:
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
    path = hub.locate("org/model", source=source)
    assert {name: (path / name).read_bytes() for name in shards} == files
    assert [len(served.ranges(name)) for name in shards] == [1, 1, 1]


def test_files_of_the_same_content_come_once(served: Hub, source: dict[str, str]) -> None:
    offer(
        served,
        **{"a.safetensors": LARGE_FILE, "b.safetensors": LARGE_FILE},
        **{"model.safetensors.index.json": index(a="a.safetensors", b="b.safetensors")},
    )
    path = hub.download("org/model", source=source)
    assert (path / "a.safetensors").read_bytes() == (path / "b.safetensors").read_bytes() == LARGE_FILE
    assert len(served.ranges("a.safetensors") + served.ranges("b.safetensors")) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again_when_it_says(
    served: Hub, source: dict[str, str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    offer(served, **{"model.safetensors": LARGE_FILE})
    served.busy = [(status, {"Retry-After": "7"})]
    assert (hub.download("org/model", source=source) / "model.safetensors").is_file()
    assert waited == [7]


@pytest.mark.parametrize("place", range(6))
def test_a_busy_hub_at_any_moment(
    served: Hub, source: dict[str, str], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """From the first contact to the last byte."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    offer(served, **{"model.safetensors": LARGE_FILE})
    asked = type(served.requests)

    class Counted(asked):
        def append(self, request: tuple[str, str, dict[str, str]]) -> None:
            if len(self) == place:
                served.busy = [(503, {})]
            super().append(request)

    served.requests = Counted()
    assert (hub.download("org/model", source=source) / "model.safetensors").is_file()
    assert len(served.requests) > place


def test_files_in_xet_storage_come_by_http(served: Hub, source: dict[str, str]) -> None:
    """Its protocol does not go on where another process was."""
    offer(served, **{"model.safetensors": LARGE_FILE})
    served.xet = True
    assert (hub.download("org/model", source=source) / "model.safetensors").read_bytes() == LARGE_FILE


def test_a_disk_that_is_too_small_is_told_before(
    served: Hub, source: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(served, **{"model.safetensors": LARGE_FILE})
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=len(LARGE_FILE) - 1))
    with pytest.raises(StartupError, match=r"There is no room for org/model in .*: 0\.00 GB are to come.* set HF_HOME"):
        hub.download("org/model", source=source)
    assert served.ranges("model.safetensors") == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_file_that_may_not_grow_ends_with_one_line(served: Hub, source: dict[str, str]) -> None:
    offer(served, **{"model.safetensors": BIG})

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))

    full = start(source, preexec_fn=limit)
    said, _ = full.communicate(timeout=60)
    assert full.returncode == 1
    assert "There is no room for org/model" in said
    assert "Traceback" not in said
    again = start(source)
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert served.ranges("model.safetensors") == [None, f"bytes={3 << 20}-"]


def test_progress_without_a_terminal_is_a_line_now_and_then(
    served: Hub, source: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(served, **{"model.safetensors": LARGE_FILE})
    with caplog.at_level(logging.INFO):
        hub.download("org/model", source=source)
    assert not [line for line in caplog.messages if line.startswith("Download: ")]  # it was there at once
    monkeypatch.setattr(hub, "PROGRESS_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO):
        hub.download("org/model", source=source | {"HF_HOME": source["HF_HOME"] + "2"})
    lines = [line for line in caplog.messages if line.startswith("Download: ")]
    assert lines[-1].startswith("Download: 262kB of 262kB after")
    assert len(lines) <= 1 + len(LARGE_FILE) // CHUNK


def test_a_second_try_keeps_the_files_that_came_whole(served: Hub, source: dict[str, str]) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {"model.safetensors.index.json": index(a=shards[0], b=shards[1])}
    offer(served, shards[0], **weight_map, **{shards[1]: LARGE_FILE})
    served.cut_after, served.gone_after_cut = 100, True
    with pytest.raises(StartupError, match=r"failed: .*what has come is kept"):
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


def no_hub(served: Hub) -> None:
    served.busy = [(200, {"Content-Type": "text/html"})]


def refused(status: int, reason: str) -> Callable[[Hub], None]:
    def arrange(served: Hub) -> None:
        offer(served, "model.safetensors")
        served.busy = [(status, {"X-Error-Message": reason})]

    return arrange


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (no_hub, "does not answer as a model hub does. Check HF_ENDPOINT"),
        (refused(401, "Invalid credentials in Authorization header"), "not give org/model to you .* HF_TOKEN is valid"),
        (refused(403, "you may not"), "The hub does not give org/model to you .403 Forbidden: you may not"),
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


def test_a_cache_that_cannot_be_written(served: Hub, source: dict[str, str]) -> None:
    offer(served, "model.safetensors")
    Path(source["HF_HOME"]).write_text("a file")
    with pytest.raises(StartupError, match=r"cannot be written .* Set HF_HOME to a folder that can"):
        hub.download("org/model", source=source)


def test_large_files_lie_behind_a_redirect(served: Hub, source: dict[str, str]) -> None:
    offer(served, **{"model.safetensors": bytes(LARGE)})
    path = hub.download("org/model", source={**source, "HF_TOKEN": served.token})
    assert (path / "model.safetensors").stat().st_size == LARGE
    (elsewhere,) = [headers for _, path, headers in served.requests if path.startswith("/cdn/")]
    assert "authorization" not in {name.lower() for name in elsewhere}  # the token is the hub's alone
