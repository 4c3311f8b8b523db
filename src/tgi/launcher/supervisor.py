"""Start, watch, start again, stop: the launcher's loop, in the main thread.

Signals, ends of children and verdicts of the watchdog are queued, a turn handles them. Knows commands, not what is in
them.

What a death means is decided here alone. Until the server has been announced, every death ends the start. From then on
what died is started again, shards all together, the router alone, as long as `restarts` allows it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tgi.launcher.children import TICK_S, LauncherFailed, Program, ending
from tgi.launcher.log_relay import RouterRelay
from tgi.launcher.process import Command
from tgi.launcher.restarts import LIMIT, WINDOW_S, Restarts
from tgi.launcher.shard_group import BLAME_S, ShardGroup
from tgi.launcher.signals import StopAsked, StopSignals
from tgi.launcher.sockets import SocketDirectory

logger = logging.getLogger("tgi.launcher")

SHORT_TICK_S = 0.01
WAITING_LINE_S = 10.0
# While starting there is no request to wait for.
STARTING_GRACE_S = 5.0
# After a failure there is none that could finish.
FAILED_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to run, ready made."""

    shards: Callable[[float], Sequence[Command]]  # a command per rank, for a scale of the prefill budget
    router: Command
    model_id: str
    num_shard: int
    address: str  # "http://127.0.0.1:3000"
    needs_key: bool
    grace_s: float  # that running requests have at a stop
    health_timeout_s: float  # how long a shard may leave Health unanswered


class Supervisor:
    def __init__(self, plan: Plan, sockets: SocketDirectory, signals: StopSignals) -> None:
        self._plan = plan
        self._signals = signals
        self._shards = ShardGroup(plan.shards, sockets, signals, plan.health_timeout_s)
        self._router: Program | None = None
        self._restarts = Restarts(time.monotonic)
        # When what has died is to be started again; None while it runs.
        self._shards_due: float | None = None
        self._router_due: float | None = None
        self._connected = False  # the running router has said so
        self._connected_told = False
        self._announced = False
        self._started_at = time.monotonic()
        self._router_started_at = self._started_at
        self._next_waiting_line = self._started_at + WAITING_LINE_S

    def run(self) -> None:
        """Returns after a stop that was asked for. Raises LauncherFailed after everything has been stopped."""
        grace_s = FAILED_GRACE_S
        try:
            try:
                self._start()
                while True:
                    self._signals.tick(self._turn_s())
                    self._signals.check()
                    self._note_progress()
                    self._tend_shards()
                    self._tend_router()
            except StopAsked:
                self._stop_router(self._grace_s(), watch_shards=not self._is_starting_again())
                grace_s = self._grace_s()
            finally:
                self._stop_router(grace_s, watch_shards=False)
                self._shards.stop(grace_s)
        finally:
            self._kill_everything()

    def _start(self) -> None:
        """Shards and router side by side: the router waits for the sockets by itself."""
        logger.info("Loading %s in %d shard(s)", self._plan.model_id, self._plan.num_shard)
        self._shards.start()
        logger.info("Starting Webserver")
        self._start_router()

    def _start_router(self) -> None:
        self._connected = self._connected_told = False
        self._router_started_at = time.monotonic()
        self._router = Program(self._plan.router, RouterRelay(self._on_connected), self._signals)

    def _on_connected(self) -> None:
        # In the router's reader thread: the main thread announces.
        self._connected = True
        self._signals.wake()

    def _turn_s(self) -> float:
        """How long this turn may wait for an event."""
        now = time.monotonic()
        dues = [due for due in (self._shards_due, self._router_due) if due is not None]
        return min([TICK_S, *(max(due - now, SHORT_TICK_S) for due in dues)])

    def _note_progress(self) -> None:
        now = time.monotonic()
        self._note_finished()
        self._shards.tell_ready()
        if self._connected and not self._connected_told:
            self._connected_told = True
            if self._announced:
                logger.info("Webserver serves again after %.1fs", now - self._router_started_at)
            else:
                self._announced = True
                self._announce(now - self._started_at)
        if now >= self._next_waiting_line:
            self._next_waiting_line = now + WAITING_LINE_S
            self._shards.tell_waiting()
            if not self._announced and self._shards.is_ready:
                logger.info("Waiting for the warm-up...")

    def _note_finished(self) -> None:
        if self._shards.has_finished_requests():
            self._restarts.note_finished()

    def _announce(self, seconds: float) -> None:
        key = " -H 'Authorization: Bearer YOUR_API_KEY'" if self._plan.needs_key else ""
        body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 50}'
        curl = f"curl {self._plan.address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
        # On a line of its own, to be pasted.
        logger.info(
            "Ready: %s serves %s (after %.1fs). Try:\n\n%s\n", self._plan.address, self._plan.model_id, seconds, curl
        )

    def _tend_shards(self) -> None:
        if self._shards_due is None:
            self._check_shards()
        elif self._shards.has_ended() and time.monotonic() >= self._shards_due:
            self._shards_due = None
            self._shards.start()
            self._next_waiting_line = time.monotonic() + WAITING_LINE_S

    def _check_shards(self) -> None:
        failure = self._shard_failure()
        if failure is not None:
            self._shards.kill()
            self._note_finished()  # what finished until the end
            self._shards_due = self._due_again(failure, "the shards")

    def _shard_failure(self) -> str | None:
        death = self._shards.find_death(starting=not self._announced)
        if death is None:
            return None
        return f"{'ShardFailed' if self._announced else 'ShardCannotStart'}: rank {death.rank}: {death.reason}"

    def _tend_router(self) -> None:
        assert self._router is not None
        if self._router_due is not None:
            if time.monotonic() >= self._router_due:
                self._router_due = None
                self._start_router()
        elif self._router.child.has_ended():
            if not self._announced:
                self._blame_shards()
            word = "WebserverFailed" if self._announced else "WebserverCannotStart"
            failure = f"{word}: {self._router.reason(starting=not self._connected)}"
            self._router_due = self._due_again(failure, "the webserver")

    def _blame_shards(self) -> None:
        """A dying shard closes its connections before its end can be seen, and the router ends by that. Raises
        LauncherFailed."""
        deadline = time.monotonic() + BLAME_S
        while time.monotonic() < deadline:
            self._check_shards()
            self._signals.tick(TICK_S / 2)

    def _due_again(self, failure: str, what: str) -> float:
        """When `what` is to be started again. Raises LauncherFailed when it is not."""
        if not self._announced:
            raise LauncherFailed(failure)
        restart = self._restarts.next(what)
        if restart is None:
            raise LauncherFailed(
                f"{failure} (given up: {LIMIT} restarts within {WINDOW_S / 60:g} minutes, "
                "and no request has finished in between)"
            )
        pause = f"in {restart.delay_s:g} s" if restart.delay_s else "at once"
        logger.error("%s", failure)
        logger.warning(
            "Starting %s again %s (restart %d of %d until a request finishes)", what, pause, restart.number, LIMIT
        )
        return time.monotonic() + restart.delay_s

    def _stop_router(self, grace_s: float, watch_shards: bool) -> None:
        """Let the router finish its requests. With `watch_shards` a shard that dies meanwhile is a failure."""
        router = self._router
        if router is None or router.child.has_ended():
            return
        logger.info("Terminating webserver")
        for _ in ending([router.child], grace_s, self._signals):
            if watch_shards and (failure := self._shard_failure()) is not None:
                self._shards.kill()
                raise LauncherFailed(failure)
        logger.info("webserver terminated")

    def _is_starting_again(self) -> bool:
        """Of shards that do, nobody expects that they finish anything."""
        return self._shards_due is not None or (self._shards.num_starts > 1 and not self._shards.is_ready)

    def _grace_s(self) -> float:
        return self._plan.grace_s if self._announced else min(self._plan.grace_s, STARTING_GRACE_S)

    def _kill_everything(self) -> None:
        """The last resort, when even stopping has raised."""
        self._shards.kill()
        if self._router is not None:
            self._router.child.kill()
