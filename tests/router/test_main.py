"""The router as a process, before a scripted shard: start, serve, refuse, stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.app import WAIT_S, dechunk, read_until
from tests.fakes.shard import ScriptedShard, scripted_text
from tests.fakes.tokenizer import EOS_ID, TURN_END_ID, ids_of, packed, write_byte_tokenizer
from tgi.errors import StartupError
from tgi.router.cli import read_config
from tgi.router.main import _load_with_every_end, _snapshot_sha, bind
from tgi.router.warm_up import check
from tgi.shard_client.messages import ShardInfo, WarmupResult

START_S = 60.0


class RouterProcess:
    """`text-generation-router` with its log."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tgi.router.cli import main; main()", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **environment},
        )
        self.lines: list[str] = []
        self._seen = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._seen:
                self.lines.append(line.rstrip("\n"))
                self._seen.notify_all()
        with self._seen:
            self.lines.append("")  # the end
            self._seen.notify_all()

    def wait_for_line(self, pattern: str) -> str:
        def found() -> str | None:
            return next((line for line in self.lines if re.search(pattern, line)), None)

        with self._seen:
            assert self._seen.wait_for(lambda: found() is not None or "" in self.lines, START_S), self.lines
            line = found()
        assert line is not None, self.lines
        return line

    def exit_code(self) -> int:
        code = self.process.wait(START_S)
        self._reader.join(WAIT_S)
        return code

    def log(self) -> list[str]:
        return [line for line in self.lines if line]


@contextlib.contextmanager
def router(*arguments: str, **environment: str) -> Iterator[RouterProcess]:
    running = RouterProcess(*arguments, **environment)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running._reader.join(WAIT_S)
        running.process.stdout.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_byte_tokenizer(tmp_path / "model")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(port: int, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, json.loads(data) if data else None


def get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def arguments(model: Path, port: int, uds_path: Path) -> list[str]:
    return [
        "--tokenizer-name", str(model), "--master-shard-uds-path", str(uds_path), "--hostname", "127.0.0.1",
        "--port", str(port),
    ]  # fmt: skip


@pytest.mark.fault("TGI#2035", "TGI#1842")
@pytest.mark.row("F: JSON logs, the Connected line")
def test_a_router_that_starts_before_its_shard_serves_and_finishes_its_streams(
    model: Path, port: int, tmp_path: Path
) -> None:
    uds_path = tmp_path / "shard-0"
    key = "Sesame-4711-open"
    environment = {"API_KEY": key, "LOG_LEVEL": "debug", "CHAT_TEMPLATE": "Mine: {{ messages[0].content }}"}
    with router(*arguments(model, port, uds_path), "--json-output", **environment) as running:
        running.wait_for_line("Waiting for the shard")
        with ScriptedShard(uds_path) as shard:
            connected = json.loads(running.wait_for_line("Connected"))
            assert (connected["message"], connected["level"]) == ("Connected", "INFO")
            expected = scripted_text(packed(ids_of("Hi")), 5)
            bearer = {"authorization": f"Bearer {key}"}
            body = {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}
            assert post(port, "/generate", body, **bearer) == (200, {"generated_text": expected})
            assert post(port, "/generate", body) == (401, None)
            chat = {"messages": [{"role": "user", "content": "Hi"}]}
            assert post(port, "/chat_tokenize", chat, **bearer)[1]["templated_text"] == "Mine: Hi"
            assert get(port, "/health") == 200
            maps = Path(f"/proc/{running.process.pid}/maps").read_text()
            assert "libtorch" not in maps

            shard.hold()
            client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
            data = json.dumps(body).encode()
            head = f"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{key_line(key)}"
            client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            shard.let(1)
            received = read_until(client, b'"index":1,')
            running.process.send_signal(signal.SIGTERM)
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
                except OSError:
                    break
            shard.let()
            received = read_until(client, b"0\r\n\r\n", received)
            client.close()
            assert f'"generated_text":"{expected}"'.encode() in dechunk(received)
            assert running.exit_code() == 0
            shard.assert_rules_kept()
    messages = [json.loads(line)["message"] for line in running.log()]
    assert messages.index("Warming up model") < messages.index("Connected")
    assert any(re.fullmatch(r"Setting max batch total tokens to \d+", message) for message in messages)
    assert key not in "\n".join(running.lines)


def key_line(key: str) -> str:
    return f"authorization: Bearer {key}\r\n"


@pytest.mark.fault("TGI#1842")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_that_waits_for_its_shard_can_be_stopped(
    model: Path, port: int, tmp_path: Path, number: signal.Signals
) -> None:
    with router(*arguments(model, port, tmp_path / "nobody"), LOG_LEVEL="debug") as running:
        running.wait_for_line("Waiting for the shard")
        running.process.send_signal(number)
        assert running.exit_code() == 0


def test_a_busy_port_is_one_line_and_a_failure(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with router(*arguments(model, port, tmp_path / "nobody")) as running:
            assert running.exit_code() == 1
    assert len(running.log()) == 1
    assert running.log()[0].endswith(f"Port {port} is in use: stop what listens there, or choose another with --port")


def test_a_missing_model_is_one_line_and_a_failure(port: int, tmp_path: Path) -> None:
    with router(*arguments(tmp_path / "missing", port, tmp_path / "nobody")) as running:
        assert running.exit_code() == 1
    assert len(running.log()) == 1
    assert f"{tmp_path}/missing does not exist" in running.log()[0]


def test_a_bound_port_refuses_until_somebody_listens() -> None:
    listener = bind("127.0.0.1", 0)
    with listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


@pytest.mark.parametrize(("hostname", "told"), [("203.0.113.7", "Cannot listen on 203.0.113.7:0: .*Check --hostname")])
def test_an_address_of_another_machine(hostname: str, told: str) -> None:
    with pytest.raises(StartupError, match=told):
        bind(hostname, 0)


INFO = ShardInfo("llama", "float32", "cpu", "cpu", 16, 300, True, True, 0, 1, 4096, False)
WARM = WarmupResult(3000, 4000, 8000, 500, 16, 128)


@pytest.mark.parametrize(
    ("given", "info", "warm", "told"),
    [
        ({"max_total_tokens": 9000}, INFO, WARM, "Not enough memory to handle `max_total_tokens=9000`"),
        ({}, INFO, replace(WARM, max_input_tokens=4000), "`max_input_tokens` must be < `max_total_tokens`"),
        (
            {},
            INFO,
            replace(WARM, max_batch_total_tokens=3999),
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 4000 and 3999",
        ),
        (
            {"max_batch_prefill_tokens": 2999},
            replace(INFO, supports_chunking=False),
            WARM,
            "`max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: 2999 and 3000",
        ),
        ({"max_batch_prefill_tokens": 2999}, INFO, WARM, None),
        ({}, INFO, WARM, None),
    ],
)
def test_what_only_the_warm_up_can_tell(
    given: dict[str, Any], info: ShardInfo, warm: WarmupResult, told: str | None
) -> None:
    config = read_config(given, {})
    if told is None:
        check(config, info, warm)
    else:
        with pytest.raises(StartupError, match=f"^{re.escape('Argument validation error: ' + told)}$"):
            check(config, info, warm)


@pytest.mark.fault("vllm#4180")
def test_the_end_of_a_chats_turn_ends_answers_though_no_file_names_it(tmp_path: Path) -> None:
    turns = "{% for message in messages %}{{ message.role + message.content + END }}{% endfor %}"
    ends = {"'</s>'": (EOS_ID,), "'<|im_end|>\n'": (EOS_ID, TURN_END_ID)}
    for text, eos_ids in ends.items():
        path = write_byte_tokenizer(tmp_path, turns.replace("END", text))
        assert _load_with_every_end(path, None, None).eos_ids == eos_ids
    given = turns.replace("END", "'<|im_end|>'")  # --chat-template
    assert _load_with_every_end(write_byte_tokenizer(tmp_path, None), None, given).eos_ids == (EOS_ID, TURN_END_ID)


def test_the_commit_of_a_model_in_the_hubs_cache() -> None:
    sha = "0123456789abcdef0123456789abcdef01234567"
    assert _snapshot_sha(Path(f"/cache/models--a--b/snapshots/{sha}")) == sha
    assert _snapshot_sha(Path("/models/snapshots/mine")) is None
    assert _snapshot_sha(Path(f"/models/{sha}")) is None
