"""One child: its lines, its end, its group, its life tied to ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.fake_programs import TIMEOUT_S, wait_for_end
from tgi.launcher import tether
from tgi.launcher.process import Child, Command


class Started:
    """A child of `python -c code`, with its lines."""

    def __init__(self, code: str, **variables: str) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        self.closed = threading.Event()
        self._got_line = threading.Event()
        command = Command("fake", (sys.executable, "-IS", "-c", code), {"PATH": os.environ["PATH"], **variables})
        self.child = Child(command, self._keep, self.err.append, self.closed.set)

    def _keep(self, line: str) -> None:
        self.out.append(line)
        self._got_line.set()

    def end(self) -> int | None:
        wait_for_end(self.child.pid)
        assert self.child.has_ended()
        return self.child.exit_code

    def first_line(self) -> str:
        assert self._got_line.wait(TIMEOUT_S)
        return self.out[0]


def test_lines_and_exit_code() -> None:
    code = (
        "import sys; print('zw\\xe4i', file=sys.stderr); sys.stdout.buffer.write(b'eins\\n\\xff\\r\\nlast');"
        " sys.exit(7)"
    )
    started = Started(code, PYTHONIOENCODING="utf-8")
    assert started.end() == 7
    assert started.out == ["eins", "\ufffd", "last"]
    assert started.err == ["zw\xe4i"]
    assert started.closed.is_set()
    assert started.child.how_it_ended() == "ended with exit code 7"


def test_it_becomes_the_program_itself() -> None:
    started = Started("import os; print(os.getpid(), os.getsid(0), os.getppid(), flush=True); input()")
    pid, session, parent = map(int, started.first_line().split())
    assert pid == session == started.child.pid
    assert parent == os.getpid()
    assert started.end() == 1, "stdin is empty"


def test_only_the_given_environment() -> None:
    started = Started("import os; print(sorted(set(os.environ) - {'LC_CTYPE'}))", ONLY="this")
    assert started.end() == 0
    assert started.out == ["['ONLY', 'PATH']"]


@pytest.mark.parametrize(
    ("stop", "expected", "words"),
    [
        (Child.terminate, -signal.SIGTERM, "was killed by SIGTERM"),
        (Child.kill, -signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_stopping(stop: Callable[[Child], None], expected: int, words: str) -> None:
    started = Started("import signal; print('up', flush=True); signal.pause()")
    started.first_line()
    assert not started.child.has_ended()
    stop(started.child)
    assert started.end() == expected
    assert started.child.how_it_ended() == words
    stop(started.child)  # once more does no harm


@pytest.mark.parametrize("how", ["by itself", "killed"])
def test_what_a_child_has_started_goes_with_it(how: str) -> None:
    grandchild = "import signal; signal.pause()"
    wait = "" if how == "by itself" else "; import signal; signal.pause()"
    started = Started(
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-IS', '-c', {grandchild!r}]);"
        f" print(p.pid, flush=True){wait}"
    )
    pid = int(started.first_line())
    if how == "killed":
        started.child.kill()
    started.end()
    wait_for_end(pid)


def test_a_program_that_is_not_there() -> None:
    lines: list[str] = []
    child = Child(Command("fake", ("/no/such/program",), {}), lines.append, lines.append, lambda: None)
    wait_for_end(child.pid)
    assert child.has_ended()
    assert child.exit_code == tether.NOT_STARTED
    assert lines == ["Error: cannot run /no/such/program: No such file or directory"]


def test_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The parent is killed before it could clean up anything."""
    code = (
        "import signal, sys; from tgi.launcher.process import Child, Command\n"
        "argv = (sys.executable, '-IS', '-c', 'import os, signal; print(os.getpid(), flush=True); signal.pause()')\n"
        "child = Child(Command('c', argv, {}), lambda line: print(line, flush=True), print, lambda: None)\n"
        "signal.pause()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
        parent.wait()
    wait_for_end(pid)


def test_tether_refuses_to_start_for_a_parent_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-IS", tether.__file__, "1" if os.getpid() != 1 else "2", "/bin/echo", "started"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (tether.NOT_STARTED, "")
