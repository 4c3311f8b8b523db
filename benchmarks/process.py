"""A child process: started, waited for by a line of its log, asked what it costs, ended. Linux only for the costs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class DidNotStart(Exception):
    """The child ended, or took too long. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Child:
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float  # from its start to the awaited line

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, to a hundredth."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def memory_bytes(self) -> int:
        """Memory that is its own: resident and backed by no file."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1_024
        raise AssertionError("no RssAnon in /proc")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(
    command: Sequence[str], ready: str, environment: Mapping[str, str] | None = None, timeout_s: float = 240
) -> Iterator[Child]:
    """Run `command` until the block ends, then SIGTERM and wait. The block begins when its log contains `ready`."""
    _end_in_order()
    with tempfile.TemporaryDirectory(prefix="tgi-") as directory:
        log = Path(directory) / "log"
        began = time.perf_counter()
        with log.open("wb") as output:
            # A session of its own, so that what the child leaves behind is found and ended with the group.
            process = subprocess.Popen(
                list(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            _wait_until_ready(process, log, ready, began + timeout_s)
            yield Child(process, log, time.perf_counter() - began)
        finally:
            _stop(process)


def _end_in_order() -> None:
    """SIGTERM would end us without a word, and leave the children running."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, ready: str, deadline: float) -> None:
    while ready not in log.read_text(errors="replace"):
        if process.poll() is not None:
            raise DidNotStart(f"it ended with code {process.returncode}:\n{_tail(log)}")
        if time.perf_counter() > deadline:
            raise DidNotStart(f"no {ready!r} in time:\n{_tail(log)}")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])
