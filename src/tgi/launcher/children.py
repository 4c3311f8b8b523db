"""Children together with what they have said: why one ended, how several are asked to end. Knows not what they do."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from tgi.errors import TgiError
from tgi.launcher.log_relay import Relay, SpanRelay
from tgi.launcher.process import Child, Command
from tgi.launcher.signals import StopSignals

logger = logging.getLogger("tgi.launcher")

TICK_S = 0.1
# A download has no request to wait for.
DOWNLOAD_GRACE_S = 5.0


class LauncherFailed(TgiError):
    """The server cannot go on. The text starts with TGI's word for it: `ShardFailed: …`."""


class Program:
    """A child and what it has said. Raises LauncherFailed when it cannot be started."""

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


def download(command: Command, model_id: str, signals: StopSignals) -> None:
    """Run the download command to its end. Raises LauncherFailed, or StopAsked after stopping it."""
    logger.info("Starting check and download process for %s", model_id)
    program = Program(command, SpanRelay({"name": "download"}), signals)
    try:
        while not program.child.has_ended():
            signals.tick(TICK_S)
            signals.check()
    finally:
        stop([program.child], DOWNLOAD_GRACE_S, signals)
    if program.child.exit_code != 0:
        raise LauncherFailed(f"DownloadError: {program.reason(starting=True)}")
    logger.info("Successfully downloaded weights for %s", model_id)


def stop(children: Sequence[Child], grace_s: float, signals: StopSignals) -> None:
    """Ask, wait, kill: returns when all have ended."""
    names = ", ".join(child.name for child in children if not child.has_ended())
    if names:
        logger.info("Terminating %s", names)
        for _ in ending(children, grace_s, signals):
            pass
        logger.info("%s terminated", names)


def ending(children: Sequence[Child], grace_s: float, signals: StopSignals) -> Iterator[None]:
    """The same, yielding once per tick until all have ended."""
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
