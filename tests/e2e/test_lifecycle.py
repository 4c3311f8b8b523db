"""Start, stop and failure of the whole server: what is said, with which code it ends, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from benchmarks.process import free_port
from tests.e2e.client import Answer, Client
from tests.e2e.servers import Process, launch_command, launched, running, until, wait_until
from tests.fakes.tiny_model import write_tiny_llama
from tgi import hub

pytestmark = [pytest.mark.slow, pytest.mark.row("C: Supervision, exit codes, signals")]

KEY = "Sesame-4711-open"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=17)


@pytest.fixture(scope="module")
def gguf() -> Path:
    return hub.locate(hub.BUNDLED_MODEL)


@pytest.mark.fault("TGI#2035")
def test_a_stop_lets_running_streams_finish(model: Path) -> None:
    """8 streams, SIGTERM in their midst: each has all its tokens, a new client is refused meanwhile."""
    num_streams, length = 8, 1500
    first_events = 0

    async def one(client: Client, index: int) -> list[int]:
        nonlocal first_events
        parameters = {"max_new_tokens": length, "ignore_eos": True, "details": True, "seed": index, "temperature": 0.9}
        ids: list[int] = []
        finish = None
        async for text in client.events("/generate_stream", {"inputs": "hello", "parameters": parameters}):
            event = json.loads(text)
            first_events += not ids
            ids.append(event["token"]["id"])
            finish = (event["details"] or {}).get("finish_reason")
        assert finish == "length"
        return ids

    async def run(port: int, launcher: Process) -> None:
        async with Client(f"http://127.0.0.1:{port}") as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(client, index)) for index in range(num_streams)]
            await until(lambda: first_events == num_streams, "all streams run")
            launcher.popen.send_signal(signal.SIGTERM)
            await until(lambda: is_refused(port), "the port is closed")
            assert not any(task.done() for task in tasks), "the streams ended too soon to tell anything"
        assert [len(task.result()) for task in tasks] == [length] * num_streams
        assert len({tuple(task.result()) for task in tasks}) == num_streams

    with launched("--model-id", str(model)) as server:
        asyncio.run(run(server.port, server.launcher))
        assert server.launcher.wait() == 0, server.log
        assert "SIGTERM received: stopping" in server.log
        assert not re.search(r"\b(ERROR|WARN)\b|Traceback", server.log), server.log


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.fault("TGI#1842")
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "Starting Webserver"),
        (signal.SIGINT, "Loading .*float32"),
        (signal.SIGTERM, "Shard ready|Server started"),
        (signal.SIGINT, "Warming up model"),
    ],
)
def test_a_stop_while_starting(model: Path, number: signal.Signals, moment: str) -> None:
    with running(launch_command(free_port(), "--model-id", str(model), "--dtype", "float32")) as launcher:
        launcher.wait_for(moment)
        assert launcher.stop(number, timeout_s=30) == 0, launcher.log
        assert f"{number.name} received: stopping" in launcher.log
        assert not re.search(r"^Error|Traceback|\bERROR\b", launcher.log, re.MULTILINE), launcher.log


@pytest.mark.fault("TGI#1842")
def test_a_stop_of_an_idle_server(model: Path) -> None:
    """By Ctrl+C, with a client's idle connection open."""
    with launched("--model-id", str(model)) as server:
        with socket.create_connection(("127.0.0.1", server.port)):
            assert server.launcher.stop(signal.SIGINT, timeout_s=30) == 0
        assert is_refused(server.port)


def fails(arguments: list[str], *told: str, environment: dict[str, str] | None = None) -> str:
    """The server cannot start: exactly one line says why, and that line says `told`."""
    with running(arguments, environment) as launcher:
        assert launcher.wait(120) == 1, launcher.log
        errors = [line for line in launcher.lines if "Error" in line or "ERROR" in line or "Traceback" in line]
        assert len(errors) == 1, launcher.log
        assert errors[0] == launcher.lines[-1], launcher.log
        assert errors[0].startswith("Error: ")
        for text in told:
            assert text in errors[0]
        launcher.assert_nothing_left()
        return errors[0]


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    fails(launch_command(free_port(), "--model-id", str(missing)), f"{missing} does not exist")
    (tmp_path / "empty").mkdir()
    fails(launch_command(free_port(), "--model-id", str(tmp_path / "empty")), str(tmp_path / "empty"), "config.json")
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    fails(launch_command(free_port(), "--model-id", "no/such-model"), "no/such-model", environment=environment)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (model / "model.safetensors").unlink()
    fails(launch_command(free_port(), "--model-id", str(model)), str(model), "safetensors")


def test_weights_that_are_cut_off(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    fails(launch_command(free_port(), "--model-id", str(model)), str(weights))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_gguf_that_is_cut_off(gguf: Path, tmp_path: Path, share: float) -> None:
    copy = tmp_path / "cut.gguf"
    with gguf.open("rb") as source, copy.open("wb") as target:
        left = int(gguf.stat().st_size * share)
        while left > 0:
            left -= target.write(source.read(min(left, 1 << 24)))
    fails(launch_command(free_port(), "--model-id", str(copy)), str(copy))


def test_a_gguf_of_random_bytes(gguf: Path, tmp_path: Path) -> None:
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(os.urandom(1 << 16))
    fails(launch_command(free_port(), "--model-id", str(noise)), str(noise), "GGUF")
    with gguf.open("rb") as source:
        noise.write_bytes(source.read(24) + os.urandom(1 << 16))
    fails(launch_command(free_port(), "--model-id", str(noise)), str(noise))


def test_a_busy_port(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fails(launch_command(port, "--model-id", str(model)), f"Port {port}", "in use", "--port")


def test_a_socket_path_that_is_too_long_or_taken(model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * 110))
    command = launch_command(free_port(), "--model-id", str(model), "--shard-uds-path")
    fails([*command, path], path, "bytes", "--shard-uds-path")
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{path}-0")
        other.listen()
        fails([*command, path], f"{path}-0", "Another server", "--shard-uds-path")


def test_a_limit_that_the_model_cannot_have(model: Path) -> None:
    """Only the shard can tell, at warm-up; still it is one line."""
    command = launch_command(free_port(), "--model-id", str(model))
    fails([*command, "--max-batch-total-tokens", str(1 << 40)], "--max-batch-total-tokens", "MiB")


@pytest.mark.fault("TGI#2026")
@pytest.mark.row("B: API key")
@pytest.mark.parametrize("json_output", [False, True])
def test_the_key_is_in_no_log_and_no_process_list(model: Path, json_output: bool) -> None:
    arguments = ["--model-id", str(model), "--api-key", KEY, "--env"] + ["--json-output"] * json_output

    async def ask(url: str) -> tuple[Answer, int]:
        async with Client(url, KEY) as client:
            allowed = await client.generate("hello", max_new_tokens=3)
        async with Client(url, "wrong" + KEY) as client:
            return allowed, await client.status("/generate", {"inputs": "hello"})

    with launched(*arguments, environment={"LOG_LEVEL": "debug"}) as server:
        allowed, status = asyncio.run(ask(server.url))
        assert allowed.ids
        assert status == 401
        commands = server.launcher.family()
        assert len(commands) == 3
        assert not [command for command in commands.values() if KEY in command]
        with_key = [pid for pid in commands if KEY.encode() in Path(f"/proc/{pid}/environ").read_bytes()]
        assert server.launcher.child("text-generation-server") not in with_key, "the shard has no use for it"
    assert KEY not in server.log


@pytest.mark.fault("TGI#2593")
def test_a_shard_that_is_killed(model: Path) -> None:
    """It is started again; the router stays, and answers anew."""
    with launched("--model-id", str(model)) as server:
        router = server.launcher.child("text-generation-router")
        first = server.launcher.child("text-generation-server")
        server.launcher.wait_for("Shard ready in")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.log.count("Shard ready in") == 2 or None, "the shard is ready again", 120)
        asyncio.run(answers_again(server.url))
        assert server.launcher.child("text-generation-router") == router
        assert server.launcher.child("text-generation-server") != first
        assert "ShardFailed: rank 0: shard 0 was killed by SIGKILL" in server.log
        assert "restart 1 of 5" in server.log


@pytest.mark.fault("TGI#2593")
def test_a_router_that_is_killed(model: Path) -> None:
    """It is started again and finds the shard as it was."""
    with launched("--model-id", str(model)) as server:
        shard = server.launcher.child("text-generation-server")
        os.kill(server.launcher.child("text-generation-router"), signal.SIGKILL)
        killed_at = time.monotonic()
        server.launcher.wait_for("Webserver serves again after")
        asyncio.run(answers_again(server.url))
        print(f"served again {time.monotonic() - killed_at:.2f} s after the kill")
        assert server.launcher.child("text-generation-server") == shard
        assert "WebserverFailed: router was killed by SIGKILL" in server.log


async def answers_again(url: str) -> None:
    """Returns when a request has been answered; those before may find nobody, or the model server on its way."""
    async with Client(url) as client, asyncio.timeout(120):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                status = await client.status("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 3}})
                if status == 200:
                    return
            await asyncio.sleep(0.05)


def test_a_launcher_that_is_killed_takes_all_with_it(model: Path) -> None:
    with launched("--model-id", str(model)) as server:
        server.launcher.popen.kill()
        assert server.launcher.wait() == -signal.SIGKILL
        wait_until(lambda: not server.launcher.family(), "its children end", 10)


@contextlib.contextmanager
def other_directory(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def test_two_servers_of_one_machine(model: Path, tmp_path: Path) -> None:
    """With all defaults but the port, they do not meet. The model's path may be relative."""
    (tmp_path / "here").symlink_to(model)
    with other_directory(tmp_path), launched("--model-id", "here") as first, launched("--model-id", "here") as second:

        async def ask(url: str) -> Answer:
            async with Client(url) as client:
                return await client.generate("hello", max_new_tokens=5)

        assert asyncio.run(ask(first.url)).told == asyncio.run(ask(second.url)).told
