"""Servers for tests: whole ones (launcher, router, shard), a shard alone, and a router in this process before a shard.

Every process carries a mark in its environment, which its children inherit: so a test finds whatever was left behind,
whoever its parent is by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from benchmarks.process import free_port
from benchmarks.server_process import program
from tgi.router.api.server import Server
from tgi.router.cli import read_config
from tgi.router.main import assembled, bind
from tgi.router.scheduling.core import SchedulerCore
from tgi.router.scheduling.scheduler import Scheduler

START_S = 240.0
STOP_S = 60.0
POLL_S = 0.02
MARK = "TGI_TEST_MARK"

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], what: str, timeout_s: float = STOP_S) -> T:
    """The first truthy value of `condition`. AssertionError saying `what` never came."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


async def until(condition: Callable[[], T | None], what: str, timeout_s: float = STOP_S) -> T:
    """As `wait_until`, while the event loop goes on."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.001)
    return value


class Process:
    """A program in a session of its own, its two outputs as one list of lines, and all that descends from it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self.popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), name: value},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout:
            for line in self.popen.stdout:
                self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> str:
        """The first line in which `pattern` is found. AssertionError with the log when the program ends before."""

        def found() -> str | None:
            ended = not self._reader.is_alive()
            line = next((line for line in self.lines if re.search(pattern, line)), None)
            assert line is not None or not ended, f"it ended without {pattern!r}:\n{self.log}"
            return line

        return wait_until(found, f"a line with {pattern!r} in\n{self.log}", timeout_s)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Its exit code, after its last line has been read."""
        try:
            code = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.log}") from None
        self._reader.join(STOP_S)
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = STOP_S) -> int:
        self.popen.send_signal(number)
        return self.wait(timeout_s)

    def family(self) -> dict[int, str]:
        """Command lines of the program and its descendants that are alive, by process id."""
        found: dict[int, str] = {}
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit():
                with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                    # A dead process that nobody has waited for has an empty environment.
                    if self._mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                        words = (directory / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                        found[int(directory.name)] = b" ".join(words).decode(errors="replace")
        return found

    def child(self, name: str) -> int:
        """Process id of the one descendant whose command line holds `name`."""
        found = [pid for pid, command in self.family().items() if name in command and pid != self.popen.pid]
        assert len(found) == 1, f"{name}: {self.family()}"
        return found[0]

    def assert_nothing_left(self) -> None:
        assert self.popen.poll() is not None, "it has not been stopped"
        left = self.family()
        assert not left, f"left behind: {left}\n{self.log}"

    def kill(self) -> None:
        """The end of a test, whatever happened in it."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        self._reader.join(STOP_S)


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Process]:
    """The process, for the block to wait for and to stop; killed with its family if the block leaves it running."""
    process = Process(command, environment)
    try:
        yield process
        if process.popen.poll() is None:
            assert process.stop() == 0, process.log
        process.assert_nothing_left()
    finally:
        process.kill()


@dataclass(frozen=True, slots=True)
class Whole:
    """Launcher, router and shard."""

    url: str
    port: int
    launcher: Process

    @property
    def log(self) -> str:
        return self.launcher.log


def launch_command(port: int, *arguments: str) -> list[str]:
    return [program("text-generation-launcher"), "--hostname", "127.0.0.1", "--port", str(port), *arguments]


@contextlib.contextmanager
def launched(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Whole]:
    """A whole server that has said `Connected`; afterwards it ends on SIGTERM with code 0 and leaves no process."""
    port = free_port()
    with running(launch_command(port, *arguments), environment) as launcher:
        launcher.wait_for(r"\bConnected\b")
        yield Whole(f"http://127.0.0.1:{port}", port, launcher)


def shard_command(model: Path | str, *arguments: str) -> list[str]:
    return [program("text-generation-server"), "serve", str(model), *arguments]


@contextlib.contextmanager
def shard(
    model: Path | str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Process, str]]:
    """A shard that answers, and the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="tgi-") as directory:
        prefix = str(Path(directory, "s"))
        with running(shard_command(model, "--uds-path", prefix, *arguments), environment) as process:
            process.wait_for("Server started at")
            yield process, f"{prefix}-0"


class LocalRouter:
    """A router on an event loop of this process, so that a test can look at its scheduler between two turns.

    The loop runs only inside `run`: whatever a test wants to happen meanwhile has to be in the coroutine it gives.
    """

    def __init__(self, runner: asyncio.Runner, url: str, scheduler: Scheduler) -> None:
        self._runner = runner
        self.url = url
        self.scheduler = scheduler

    @property
    def core(self) -> SchedulerCore:
        return self.scheduler.core

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 280.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await coroutine

        return self._runner.run(bounded())

    def check(self) -> None:
        """Every block is free, cached, or held by exactly one running row."""
        self.core.allocator.check(self.core.rows.allocations())

    async def idle(self, timeout_s: float = STOP_S) -> None:
        """Wait until nobody runs or waits, then see that all memory is back."""
        await until(lambda: not self.core.rows and not self.core.queue, "an empty scheduler", timeout_s)
        self.assert_idle()

    def assert_idle(self) -> None:
        core = self.core
        assert not core.rows
        assert not core.queue
        self.check()
        assert core.allocator.num_available == core.allocator.num_blocks - 1, "blocks are neither free nor cached"
        assert (core.stats.queue_size, core.stats.batch_current_size) == (0, 0)


@contextlib.contextmanager
def local_router(
    model: Path | str, uds_path: str, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[LocalRouter]:
    """`options`: the router's flags, by field; `environment`: all that it sees of one."""
    given = {"tokenizer_name": str(model), "master_shard_uds_path": uds_path, "hostname": "127.0.0.1", **options}
    config = read_config(given, environment or {})
    with bind("127.0.0.1", 0) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        @contextlib.asynccontextmanager
        async def serving() -> AsyncIterator[Scheduler]:
            async with assembled(config) as (app, scheduler):
                listening = asyncio.Event()
                server = Server(app, on_listening=listening.set)
                task = asyncio.create_task(server.serve([listener]))
                await listening.wait()
                try:
                    yield scheduler
                finally:
                    server.should_exit = True
                    await asyncio.wait_for(task, STOP_S)

        open_router = serving()
        scheduler = runner.run(open_router.__aenter__())
        try:
            yield LocalRouter(runner, f"http://127.0.0.1:{listener.getsockname()[1]}", scheduler)
        finally:
            runner.run(open_router.__aexit__(None, None, None))


@contextlib.contextmanager
def local_server(
    model: Path | str, *, dtype: str = "float32", environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[LocalRouter]:
    """A shard of its own process and a router in this one. Whatever a test did, in the end all memory is back."""
    with (
        shard(model, "--dtype", dtype, environment=environment) as (_, uds_path),
        local_router(model, uds_path, **options) as router,
    ):
        yield router
        router.run(router.idle())
