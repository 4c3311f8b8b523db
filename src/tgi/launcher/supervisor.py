"""Download, start, watch, stop: the launcher's loop, in the main thread.

Signals and ends of children are queued, a tick handles them. Knows commands, not what is in them.

What a death means is decided in `_check_children` alone: today every death ends the server.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType

from tgi.errors import TgiError
from tgi.launcher.log_relay import Relay, RouterRelay, SpanRelay
from tgi.launcher.process import Child, Command
from tgi.launcher.sockets import SocketDirectory

logger = logging.getLogger("tgi.launcher")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.1
WAITING_LINE_S = 10.0
# While starting there is no request to wait for.
STARTING_GRACE_S = 5.0
# After a failure there is none that could finish.
FAILED_GRACE_S = 5.0
# A dying shard closes its connections before its end can be seen: whoever ends first is not always to blame.
BLAME_S = 1.0


class LauncherFailed(TgiError):
    """The server cannot go on. The text starts with TGI's word for it: `ShardFailed: …`."""


class StopAsked(Exception):
    """A signal asked the launcher to stop."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to run, ready made."""

    shards: Sequence[Command]
    router: Command
    model_id: str
    address: str  # "http://127.0.0.1:3000"
    needs_key: bool
    grace_s: float  # that running requests have at a stop


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as a queue. Takes the signals at `with`, gives them back after."""

    def __init__(self) -> None:
        # SimpleQueue.put may be called from a signal handler while the main thread is inside get.
        self.events: SimpleQueue[signal.Signals | None] = SimpleQueue()
        self.count = 0

    def __enter__(self) -> StopSignals:
        # Under nohup a hang-up is not ours to hear.
        is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in STOP_SIGNALS if not (is_deaf and number is signal.SIGHUP)]
        self._previous = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wake(self) -> None:
        """End the running tick early: something has happened to a child."""
        self.events.put(None)

    def check(self) -> None:
        """Raises StopAsked when a signal has come."""
        self.tick(0.0)
        if self.count:
            raise StopAsked

    def tick(self, longest_s: float) -> None:
        """Wait for the next event, at most `longest_s`, and take in all that have come."""
        with contextlib.suppress(Empty):
            self._take(self.events.get(timeout=max(longest_s, 0.0)))
            while True:
                self._take(self.events.get_nowait())

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.events.put(signal.Signals(number))

    def _take(self, event: signal.Signals | None) -> None:
        if event is None:
            return
        self.count += 1
        if self.count == 1:
            logger.info("%s received: stopping", event.name)
        else:
            logger.warning("%s received again: stopping now, without waiting for running requests", event.name)


class _Process:
    """A child and what it has said."""

    def __init__(self, command: Command, relay: Relay, signals: StopSignals) -> None:
        self.relay = relay
        try:
            self.child = Child(command, relay.stdout, relay.stderr, signals.wake)
        except OSError as error:
            raise LauncherFailed(f"cannot start {command.name} ({command.argv[0]}): {error.strerror}") from error

    def reason(self, starting: bool) -> str:
        """Why it ended, in one line: its own clear line if it gave one. Else, or if it has been serving, what it wrote
        last goes to the log first."""
        if self.relay.reason is None or not starting:
            for line in self.relay.last_words():
                logger.error("%s: %s", self.child.name, line)
        ended = f"{self.child.name} {self.child.how_it_ended()}"
        return self.relay.reason or (f"{ended}: {self.relay.last_line}" if self.relay.last_line else ended)


class Supervisor:
    def __init__(self, plan: Plan, sockets: SocketDirectory, signals: StopSignals) -> None:
        self._plan = plan
        self._sockets = sockets
        self._signals = signals
        self._shards: list[_Process] = []
        self._router: _Process | None = None
        self._ready_shards: set[int] = set()
        self._connected = False
        self._announced = False
        self._started_at = time.monotonic()
        self._next_waiting_line = self._started_at + WAITING_LINE_S

    def run(self) -> None:
        """Returns after a stop that was asked for. Raises LauncherFailed after everything has been stopped."""
        grace_s = FAILED_GRACE_S
        try:
            try:
                self._start()
                while True:
                    self._signals.tick(TICK_S)
                    self._signals.check()
                    self._note_progress()
                    self._check_children()
            except StopAsked:
                self._stop_router(self._grace_s(), watch_shards=True)
                grace_s = self._grace_s()
            finally:
                self._stop_router(grace_s, watch_shards=False)
                _stop([shard.child for shard in self._shards], grace_s, self._signals)
        finally:
            self._kill_everything()

    def _start(self) -> None:
        """Shards and router side by side: the router waits for the sockets by itself."""
        logger.info("Loading %s in %d shard(s)", self._plan.model_id, len(self._plan.shards))
        self._sockets.prepare(len(self._plan.shards))
        self._started_at = time.monotonic()
        self._next_waiting_line = self._started_at + WAITING_LINE_S
        for rank, command in enumerate(self._plan.shards):
            relay = SpanRelay({"name": "shard-manager", "rank": rank})
            logger.info("Starting shard", extra={"span": {"name": "shard-manager", "rank": rank}})
            self._shards.append(_Process(command, relay, self._signals))
        logger.info("Starting Webserver")
        relay = RouterRelay(self._on_connected)
        self._router = _Process(self._plan.router, relay, self._signals)

    def _on_connected(self) -> None:
        # In the router's reader thread: the main thread announces.
        self._connected = True
        self._signals.wake()

    def _note_progress(self) -> None:
        now = time.monotonic()
        for rank in range(len(self._shards)):
            if rank not in self._ready_shards and self._sockets.path(rank).is_socket():
                self._ready_shards.add(rank)
                span = {"name": "shard-manager", "rank": rank}
                logger.info("Shard ready in %.1fs", now - self._started_at, extra={"span": span})
        if self._connected and not self._announced:
            self._announced = True
            self._announce(now - self._started_at)
        if not self._announced and now >= self._next_waiting_line:
            self._next_waiting_line = now + WAITING_LINE_S
            for rank in range(len(self._shards)):
                if rank not in self._ready_shards:
                    span = {"name": "shard-manager", "rank": rank}
                    logger.info("Waiting for shard to be ready...", extra={"span": span})
            if len(self._ready_shards) == len(self._shards):
                logger.info("Waiting for the warm-up...")

    def _announce(self, seconds: float) -> None:
        key = " -H 'Authorization: Bearer YOUR_API_KEY'" if self._plan.needs_key else ""
        body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 50}'
        curl = f"curl {self._plan.address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
        # On a line of its own, to be pasted.
        logger.info(
            "Ready: %s serves %s (after %.1fs). Try:\n\n%s\n", self._plan.address, self._plan.model_id, seconds, curl
        )

    def _check_children(self) -> None:
        self._check_shards()
        assert self._router is not None
        if self._router.child.has_ended():
            deadline = time.monotonic() + BLAME_S
            while time.monotonic() < deadline:
                self._check_shards()
                self._signals.tick(TICK_S / 2)
            word = "WebserverFailed" if self._announced else "WebserverCannotStart"
            raise LauncherFailed(f"{word}: {self._router.reason(starting=not self._announced)}")

    def _check_shards(self) -> None:
        for rank, shard in enumerate(self._shards):
            if shard.child.has_ended():
                word = "ShardFailed" if self._announced else "ShardCannotStart"
                raise LauncherFailed(f"{word}: rank {rank}: {shard.reason(starting=not self._announced)}")

    def _stop_router(self, grace_s: float, watch_shards: bool) -> None:
        """Let the router finish its requests. With `watch_shards` a shard that dies meanwhile is a failure."""
        router = self._router
        if router is None or router.child.has_ended():
            return
        logger.info("Terminating webserver")
        for _ in _ending([router.child], grace_s, self._signals):
            if watch_shards:
                self._check_shards()
        logger.info("webserver terminated")

    def _grace_s(self) -> float:
        return self._plan.grace_s if self._announced else min(self._plan.grace_s, STARTING_GRACE_S)

    def _kill_everything(self) -> None:
        """The last resort, when even stopping has raised."""
        for process in [*self._shards, *([self._router] if self._router else [])]:
            process.child.kill()


def download(command: Command, model_id: str, signals: StopSignals) -> None:
    """Run the download command to its end. Raises LauncherFailed, or StopAsked after stopping it."""
    logger.info("Starting check and download process for %s", model_id)
    process = _Process(command, SpanRelay({"name": "download"}), signals)
    try:
        while not process.child.has_ended():
            signals.tick(TICK_S)
            signals.check()
    finally:
        _stop([process.child], STARTING_GRACE_S, signals)
    if process.child.exit_code != 0:
        raise LauncherFailed(f"DownloadError: {process.reason(starting=True)}")
    logger.info("Successfully downloaded weights for %s", model_id)


def _stop(children: Sequence[Child], grace_s: float, signals: StopSignals) -> None:
    names = ", ".join(child.name for child in children if not child.has_ended())
    if names:
        logger.info("Terminating %s", names)
        for _ in _ending(children, grace_s, signals):
            pass
        logger.info("%s terminated", names)


def _ending(children: Sequence[Child], grace_s: float, signals: StopSignals) -> Iterator[None]:
    """Ask, wait, kill. Yields once per tick until all have ended."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    killed = False
    while not all(child.has_ended() for child in children):
        hurried = signals.count > 1
        if not killed and (hurried or time.monotonic() >= deadline):
            if not hurried:
                logger.warning("Not ended after %.0f s: killing", grace_s)
            for child in children:
                child.kill()
            killed = True
        yield
        signals.tick(TICK_S if killed else min(TICK_S, deadline - time.monotonic()))
