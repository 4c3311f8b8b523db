"""Asks each rank for its Health, from a thread per rank, and says when one has stopped working. Kills nobody.

A verdict needs two answers (or silences) in a row: after a pause of the whole machine, or of the launcher, a rank that
is well looks hung for a moment. gRPC is imported by the first thread that finds a socket: until then the cores are
the children's, which are loading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tgi.enums import Phase
from tgi.errors import Unavailable
from tgi.shard_client.messages import Health

SOCKET_POLL_S = 0.05
LONGEST_POLL_S = 1.0
POLLS_PER_TIMEOUT = 4
CONFIRM_S = 0.25


class Judge:
    """What one rank's answers and silences add up to. Pure: times are given."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """`name`: "shard 0"; `timeout_s`: how long Health may stay unanswered."""
        self._name = name
        self._timeout_s = timeout_s
        self._suspicions = 0  # in a row
        self._silent_since: float | None = None  # when the first question was put that nobody has answered
        self.is_ready = False  # it has answered
        self.finished = 0

    @property
    def is_suspicious(self) -> bool:
        return self._suspicions > 0

    def answered(self, health: Health) -> str | None:
        """The verdict, if the rank is to be killed."""
        self.is_ready = True
        self.finished = health.finished
        self._silent_since = None
        # A rank that says that it has failed is ending by itself, with its own last words.
        grace_s = self._timeout_s if health.phase == Phase.FAILED else 0.0
        if health.since_s - grace_s <= health.hung_after_s:
            self._suspicions = 0
            return None
        return self._confirmed(f"{self._name} hung: {_doing(health)}")

    def unanswered(self, asked_at: float, now: float) -> str | None:
        """The verdict, if the rank is to be killed. One that has never answered is starting: it has no limit."""
        if not self.is_ready:
            return None
        if self._silent_since is None:
            self._silent_since = asked_at
            self._suspicions = 0
        silence_s = now - self._silent_since
        if silence_s < self._timeout_s:
            return None
        limit = _s(self._timeout_s)
        return self._confirmed(f"{self._name} is silent: Health unanswered for {silence_s:.1f} s (limit {limit})")

    def _confirmed(self, verdict: str) -> str | None:
        self._suspicions += 1
        return verdict if self._suspicions > 1 else None


class RankWatch:
    """The thread that watches one process of one rank, until it is stopped. A new process gets a new one."""

    def __init__(self, name: str, path: Path, timeout_s: float, on_event: Callable[[], None]) -> None:
        """`path`: its socket. `on_event` is called, from the thread, when a property below has changed."""
        self._path = path
        self._timeout_s = timeout_s
        self._poll_s = min(LONGEST_POLL_S, timeout_s / POLLS_PER_TIMEOUT)
        self._on_event = on_event
        self._judge = Judge(name, timeout_s)
        self._stopping = threading.Event()
        self.verdict: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"watchdog of {name}", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Health has answered."""
        return self._judge.is_ready

    @property
    def finished(self) -> int:
        """Rows that have finished since the process started, at least."""
        return self._judge.finished

    def stop(self) -> None:
        """No verdict comes any more. Does not wait for the thread: a question that waits holds it up to the timeout,
        or until the process has ended."""
        self._stopping.set()

    def join(self, longest_s: float) -> None:
        """Wait for the thread. To be called when the process has ended."""
        self._thread.join(longest_s)

    def _run(self) -> None:
        while not self._path.is_socket():
            if self._stopping.wait(SOCKET_POLL_S):
                return
        from tgi.shard_client.probe import HealthProbe

        probe = HealthProbe(str(self._path))
        try:
            while not self._stopping.is_set():
                before = (self.is_ready, self.finished)
                self.verdict = self._ask(probe.ask)
                if self.verdict is not None or (self.is_ready, self.finished) != before:
                    self._on_event()
                if self.verdict is not None:
                    return
                self._stopping.wait(self._pause_s())
        finally:
            probe.close()

    def _ask(self, ask: Callable[[float], Health]) -> str | None:
        asked_at = time.monotonic()
        # The second question after a silence only confirms it.
        timeout_s = min(CONFIRM_S, self._timeout_s) if self._judge.is_suspicious else self._timeout_s
        try:
            health = ask(timeout_s)
        except Unavailable:
            return self._judge.unanswered(asked_at, time.monotonic())
        return self._judge.answered(health)

    def _pause_s(self) -> float:
        if not self.is_ready:
            return SOCKET_POLL_S
        return min(CONFIRM_S, self._poll_s) if self._judge.is_suspicious else self._poll_s


def _doing(health: Health) -> str:
    spent = f"for {health.since_s:.1f} s (limit {_s(health.hung_after_s)})"
    match health.phase:
        case Phase.RUNNING:
            return f"step {health.step} has run {spent}"
        case Phase.IDLE:
            return f"its idle beat has been missing {spent}"
        case _:
            return f"it has been {health.phase} {spent}"


def _s(seconds: float) -> str:
    return f"{seconds:g} s"
