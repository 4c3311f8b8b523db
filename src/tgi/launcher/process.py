"""One child process: started by exec in a session of its own, its output as lines, its end noticed, asked to stop and
killed. Knows nothing of shards and routers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

# A grandchild may hold the pipes open after the child's end.
READER_TIMEOUT_S = 1.0

OnLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """`name` is what messages call the process; `argv[0]` is the program's path."""

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)  # may hold the API key


class Child:
    """A running Command. Lines of its two outputs go to the callbacks, from a thread per output.

    To be created in the main thread: the kernel ties the child's life to the thread that starts it.
    """

    def __init__(self, command: Command, on_stdout: OnLine, on_stderr: OnLine, on_end: Callable[[], None]) -> None:
        """`on_end` is called, from a thread, when the child has closed its output and ended."""
        self.name = command.name
        self.exit_code: int | None = None
        self._popen = subprocess.Popen(
            _tethered(command.argv),
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_to_end, args=(self._popen.stdout, on_stdout, on_end), daemon=True),
            threading.Thread(target=_read, args=(self._popen.stderr, on_stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def has_ended(self) -> bool:
        """True once the child has ended; its exit code is then known (negative: the signal) and its output read."""
        if self.exit_code is not None:
            return True
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        # While the child is not reaped, its group's number cannot belong to anyone else.
        self._signal_group(signal.SIGKILL)
        self.exit_code = self._popen.wait()
        for reader in self._readers:
            reader.join(READER_TIMEOUT_S)
        return True

    def terminate(self) -> None:
        """Ask it to stop. Its own children are its own affair until it has ended."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if not self.has_ended():
            self._signal_group(signal.SIGKILL)

    def how_it_ended(self) -> str:
        """ "ended with exit code 3", "was killed by SIGKILL"."""
        assert self.exit_code is not None
        if self.exit_code >= 0:
            return f"ended with exit code {self.exit_code}"
        try:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"was killed by signal {-self.exit_code}"

    def _read_to_end(self, pipe: IO[bytes], on_line: OnLine, on_end: Callable[[], None]) -> None:
        _read(pipe, on_line)
        # A process closes its files a moment before its end can be seen.
        with contextlib.suppress(ChildProcessError):  # the main thread has seen it first
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        on_end()

    def _signal_group(self, number: signal.Signals) -> None:
        # It leads its own session, so this reaches what it has started too. On some systems a group of dead processes
        # only may not be signalled.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _tethered(argv: tuple[str, ...]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return list(argv)
    tether = str(Path(__file__).with_name("tether.py"))
    return [sys.executable, "-I", "-S", tether, str(os.getpid()), *argv]


def _read(pipe: IO[bytes], on_line: OnLine) -> None:
    with pipe:
        for raw in pipe:
            on_line(raw.decode("utf-8", errors="replace").rstrip("\r\n"))
