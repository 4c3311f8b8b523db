"""Tiny programs under the names of server and router, and a launcher process that runs them.

What they do is set by the variables FAKE_SHARD and FAKE_ROUTER; every event is a line in the file FAKE_EVENTS. Shards
answer Health, over gRPC, with what the file FAKE_HEALTH holds at that moment.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 30.0

COMMON = """#!{python} {flags}
import json, os, signal, socket, sys, time

def event(name, **more):
    with open(os.environ["FAKE_EVENTS"], "ab", buffering=0) as file:
        file.write((json.dumps({{"event": name, "pid": os.getpid(), **more}}) + "\\n").encode())

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

def log(text, level="INFO"):
    print(json.dumps({{"text": text + "\\n", "record": {{"level": {{"name": level}}}}}}), flush=True)

def wait():
    return signal.sigwait({{signal.SIGTERM, signal.SIGUSR1}})

signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGUSR1}})
"""

SHARD = """
mode = os.environ.get("FAKE_SHARD", "")
if sys.argv[1] == "download-weights":
    event("download", argv=sys.argv[1:])
    log("fetching")
    if mode == "no-download":
        log("Error: the hub has no such model", "ERROR")
        sys.exit(1)
    if mode == "slow-download":
        wait()
        sys.exit(1)
    snapshot = os.path.join(os.environ["HF_HOME"], "hub", "models--org--model", "snapshots", "main")
    os.makedirs(snapshot)
    open(os.path.join(snapshot, "config.json"), "w").write(os.environ["FAKE_CONFIG"])
    open(os.path.join(snapshot, "model.safetensors"), "w").close()
    sys.exit(0)

rank = os.environ["RANK"]
path = option("--uds-path") + "-" + rank
event("shard start", rank=rank, argv=sys.argv[1:], environ=dict(os.environ), path=path)
log("loading on rank " + rank)
print("a line that is no JSON", flush=True)
if mode == "clear":
    log("Error: the file model.safetensors is cut off; fetch it again", "ERROR")
    sys.exit(1)
if mode == "clear on stderr":
    sys.exit("Error: the file model.safetensors is cut off; fetch it again")
if mode == "traceback":
    raise RuntimeError("surprise")
starts = sum(json.loads(line)["event"] == "shard start" for line in open(os.environ["FAKE_EVENTS"]))
if mode == "looping" and starts > 1:
    sys.exit("the device is gone for good")
if mode != "loading":
    from concurrent import futures
    import grpc
    from tgi.proto.v4 import generate_pb2 as pb, generate_pb2_grpc as rpc

    class Service(rpc.ShardServiceServicer):
        def Health(self, request, context):
            answer = {{"phase": "idle", "hung_after_s": 30.0}}
            if os.path.exists(os.environ["FAKE_HEALTH"]):
                answer |= json.load(open(os.environ["FAKE_HEALTH"]))
            if answer.pop("pid", os.getpid()) != os.getpid():
                answer = {{"phase": "idle", "hung_after_s": 30.0}}
            event("health", finished=answer.get("finished", 0))
            return pb.HealthResponse(**answer)

    server = grpc.server(futures.ThreadPoolExecutor(2))
    rpc.add_ShardServiceServicer_to_server(Service(), server)
    server.add_insecure_port("unix:" + path)
    server.start()
event("shard ready", rank=rank, path=path)
if mode == "stubborn":
    while wait() == signal.SIGTERM:
        event("shard ignores", rank=rank)
if wait() == signal.SIGUSR1:
    print("the device is gone", file=sys.stderr, flush=True)
    os._exit(int(os.environ.get("FAKE_CODE_" + rank) or os.environ.get("FAKE_CODE") or 3))
event("shard stop", rank=rank)
"""

ROUTER = """
def say(text):
    pretty = "2026-11-29T22:50:00.123456Z  INFO text_generation_router::main: tgi/router/main.py:99: " + text
    print(json.dumps({{"level": "INFO", "message": text}}) if "--json-output" in sys.argv else pretty, flush=True)

mode = os.environ.get("FAKE_ROUTER", "")
path = option("--master-shard-uds-path")
event("router start", argv=sys.argv[1:], environ=dict(os.environ))
if mode == "clear":
    sys.exit("Error: the tokenizer cannot be read")
if mode == "traceback":
    raise RuntimeError("surprise")
if mode == "logged":
    print("2026-11-29T22:50:00.123456Z ERROR text_generation_router::cli: tgi/router/cli.py:180: no chat template")
    sys.exit(1)
say("waiting for the shard")
while mode == "waiting" or not os.path.exists(path):
    if signal.sigtimedwait({{signal.SIGTERM}}, 0.005):
        event("router stop")
        sys.exit(0)
say("Connected")
event("router ready")
if mode == "noisy":
    for _ in range(2000):
        print("x" * 200)
    sys.stdout.flush()
first = wait()
if first == signal.SIGUSR1:
    if os.environ.get("FAKE_SHARD_PID_FILE"):
        os.kill(int(open(os.environ["FAKE_SHARD_PID_FILE"]).read()), signal.SIGUSR1)
    sys.exit(4)
event("router stopping")
say("finishing requests")
if mode == "stubborn":
    while True:
        wait()
if mode == "draining":
    wait()
event("router stop")
"""


def write_programs(folder: Path) -> Path:
    folder.mkdir()
    # The router needs the standard library only.
    for name, flags, body in (("text-generation-server", "-I", SHARD), ("text-generation-router", "-IS", ROUTER)):
        file = folder / name
        file.write_text((COMMON + body).format(python=sys.executable, flags=flags))
        file.chmod(0o755)
    return folder


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
MAIN = """
import os, signal, sys
from pathlib import Path
from tgi.launcher import restarts
from tgi.launcher.cli import main
restarts.FIRST_DELAY_S = float(os.environ["FAKE_FIRST_DELAY_S"])
signal.signal(signal.SIGHUP, getattr(signal, os.environ["FAKE_SIGHUP"]))  # whatever the tests themselves run under
sys.exit(main(Path(sys.argv.pop(1))))
"""


class Launched:
    """A running launcher: its output so far, the events of its children."""

    def __init__(self, process: subprocess.Popen[str], events: Path) -> None:
        self.process = process
        self._events = events
        self._lines: list[str] = []
        self._errors: list[str] = []
        self._closed = False
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, self._lines), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, self._errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self._lines)

    @property
    def errors(self) -> str:
        return "\n".join(self._errors)

    def wait_for(self, text: str) -> None:
        """Returns when a line with `text` is there; fails when the launcher ends or hangs before."""

        def is_there() -> bool:
            return any(text in line for line in self._lines)

        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._closed, TIMEOUT_S)
            assert is_there(), self.output + self.errors

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        for reader in self._readers:
            reader.join(TIMEOUT_S)
        return code

    def events(self) -> list[dict[str, Any]]:
        if not self._events.exists():
            return []
        whole, _, _ = self._events.read_text().rpartition("\n")  # somebody may be writing
        return [json.loads(line) for line in whole.splitlines()]

    def names(self) -> list[str]:
        """Of all events but questions for Health, which come whenever they come."""
        return [event["event"] for event in self.events() if event["event"] != "health"]

    def event(self, name: str) -> dict[str, Any]:
        return next(event for event in self.events() if event["event"] == name)

    def last(self, name: str) -> dict[str, Any]:
        return next(event for event in reversed(self.events()) if event["event"] == name)

    def wait_for_event(self, name: str, count: int = 1) -> dict[str, Any]:
        """The event `name` that comes as number `count`; fails when the launcher ends or hangs before."""
        return self.wait_for_events(lambda events: [event for event in events if event["event"] == name], count)

    def wait_for_events(
        self, choose: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], count: int
    ) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while len(found := choose(self.events())) < count:
            assert self.process.poll() is None, self.output + self.errors
            assert time.monotonic() < deadline, self.output + self.errors
            time.sleep(0.01)
        return found[count - 1]

    def wait_for_count(self, text: str, count: int) -> None:
        """Returns when `count` lines with `text` are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._count(text) >= count or self._closed, TIMEOUT_S)
            assert self._count(text) >= count, self.output + self.errors

    def _count(self, text: str) -> int:
        return sum(text in line for line in self._lines)

    def hit(self, name: str, number: int) -> None:
        """Send signal `number` to the newest process that has told the event `name`."""
        os.kill(self.last(name)["pid"], number)

    def assert_nobody_left(self) -> None:
        for pid in {event["pid"] for event in self.events()}:
            wait_for_end(pid)

    def _read(self, pipe: Any, lines: list[str]) -> None:
        for line in pipe:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def wait_for_end(pid: int) -> None:
    """Returns when the process `pid` is no more; fails after a while."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], TIMEOUT_S)[0], f"process {pid} is still there"
    finally:
        os.close(descriptor)


@contextmanager
def launched(folder: Path, argv: Sequence[str], **variables: str) -> Iterator[Launched]:
    """`text-generation-launcher argv` with the fake programs, in `folder`. Killed at the end whatever happens."""
    programs = folder / "programs"
    if not programs.exists():
        write_programs(programs)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "HF_HOME": str(folder / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "FAKE_EVENTS": str(folder / "events"),
        "FAKE_HEALTH": str(folder / "health"),
        "FAKE_FIRST_DELAY_S": "0.01",
        "FAKE_SIGHUP": "SIG_DFL",
        "FAKE_CONFIG": json.dumps(CONFIG),
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(programs), *argv],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    launcher = Launched(process, folder / "events")
    try:
        yield launcher
    finally:
        process.kill()
        launcher.exit_code()
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        launcher.assert_nobody_left()
