"""The ranks of one model: started together, watched, ended together. Decides nothing about what a death means."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tgi.launcher.children import Program, stop
from tgi.launcher.log_relay import SpanRelay
from tgi.launcher.process import Child, Command
from tgi.launcher.signals import StopSignals
from tgi.launcher.sockets import SocketDirectory
from tgi.launcher.watchdog import RankWatch
from tgi.shard_client.finished import read_finished

logger = logging.getLogger("tgi.launcher")

OUT_OF_MEMORY = 75  # EX_TEMPFAIL: a rank ran out of memory, all ranks are to start again with a smaller budget
BUDGET_STEP = 0.9
# When one rank ends, the others lose their connections and end too: whose end is seen first is not always to blame.
BLAME_S = 1.0
# A watch's last question ends with the process that it was put to.
WATCH_END_S = 2.0


@dataclass(frozen=True, slots=True)
class Death:
    rank: int
    reason: str  # one line


@dataclass(slots=True)
class Rank:
    """One process and its watch."""

    program: Program
    watch: RankWatch
    ready_told: bool = False
    finished: int = 0  # rows, as far as that has been taken

    @property
    def child(self) -> Child:
        return self.program.child


class ShardGroup:
    """To be used from the main thread, to which the kernel ties the children's lives."""

    def __init__(
        self,
        commands: Callable[[float], Sequence[Command]],
        sockets: SocketDirectory,
        signals: StopSignals,
        health_timeout_s: float,
    ) -> None:
        """`commands`: a command per rank, for a scale of the prefill budget."""
        self._commands = commands
        self._sockets = sockets
        self._signals = signals
        self._health_timeout_s = health_timeout_s
        self.num_starts = 0
        self._budget_scale = 1.0
        self._ranks: list[Rank] = []
        self._started_at = 0.0
        self._first_end_at: float | None = None

    def start(self) -> None:
        """Start every rank. Raises StartupError when a socket's path cannot be used, LauncherFailed for a program."""
        commands = self._commands(self._budget_scale)
        self._sockets.prepare(len(commands))
        self.num_starts += 1
        self._started_at = time.monotonic()
        self._first_end_at = None
        self._ranks = []
        for rank, command in enumerate(commands):
            logger.info("Starting shard", extra={"span": _span(rank)})
            program = Program(command, SpanRelay(_span(rank)), self._signals)
            watch = RankWatch(command.name, self._sockets.path(rank), self._health_timeout_s, self._signals.wake)
            self._ranks.append(Rank(program, watch))

    @property
    def is_ready(self) -> bool:
        """Every rank has answered."""
        return all(rank.watch.is_ready for rank in self._ranks)

    def tell_ready(self) -> None:
        """A line for each rank that has become ready."""
        for number, rank in enumerate(self._ranks):
            if rank.watch.is_ready and not rank.ready_told:
                rank.ready_told = True
                seconds = time.monotonic() - self._started_at
                logger.info("Shard ready in %.1fs", seconds, extra={"span": _span(number)})

    def tell_waiting(self) -> None:
        """A line for each rank that is not ready yet."""
        for number, rank in enumerate(self._ranks):
            if not rank.watch.is_ready:
                logger.info("Waiting for shard to be ready...", extra={"span": _span(number)})

    def has_finished_requests(self) -> bool:
        """Has a request finished since this was asked last?"""
        increased = False
        for number, rank in enumerate(self._ranks):
            finished = max(rank.watch.finished, read_finished(self._sockets.path(number)))
            increased |= finished > rank.finished
            rank.finished = finished
        return increased

    def find_death(self, starting: bool) -> Death | None:
        """The rank that is to blame for the end of the group, if one has ended or must be ended. `starting`: its own
        error line tells enough."""
        for number, rank in enumerate(self._ranks):
            if rank.watch.verdict is not None:
                logger.error("%s: killing it", rank.watch.verdict, extra={"span": _span(number)})
                return Death(number, rank.watch.verdict)
        ended = [number for number, rank in enumerate(self._ranks) if rank.child.has_ended()]
        if not ended:
            return None
        blamed = min(ended, key=self._innocence)
        if self._innocence(blamed) == _BYSTANDER and len(ended) < len(self._ranks) and not self._has_waited():
            return None
        if self._ranks[blamed].child.exit_code == OUT_OF_MEMORY:
            self._budget_scale *= BUDGET_STEP
            logger.warning("Out of memory: the prefill budget is scaled by %.3g from now on", self._budget_scale)
        return Death(blamed, self._ranks[blamed].program.reason(starting))

    def _innocence(self, number: int) -> int:
        code = self._ranks[number].child.exit_code or 0
        return _OUT_OF_MEMORY if code == OUT_OF_MEMORY else _KILLED if code < 0 else _BYSTANDER

    def _has_waited(self) -> bool:
        self._first_end_at = time.monotonic() if self._first_end_at is None else self._first_end_at
        return time.monotonic() - self._first_end_at >= BLAME_S

    def kill(self) -> None:
        """SIGKILL to all and to what they have started."""
        for rank in self._ranks:
            rank.watch.stop()
            rank.child.kill()

    def has_ended(self) -> bool:
        """True once every process has; its socket and its watch are then gone too."""
        if not all([rank.child.has_ended() for rank in self._ranks]):
            return False
        self._clear()
        return True

    def stop(self, grace_s: float) -> None:
        """Ask, wait, kill."""
        for rank in self._ranks:
            rank.watch.stop()
        stop([rank.child for rank in self._ranks], grace_s, self._signals)
        self._clear()

    def _clear(self) -> None:
        for rank in self._ranks:
            rank.watch.stop()
            rank.watch.join(WATCH_END_S)
        self._ranks = []
        self._sockets.remove()


_OUT_OF_MEMORY, _KILLED, _BYSTANDER = range(3)


def _span(rank: int) -> dict[str, object]:
    return {"name": "shard-manager", "rank": rank}
