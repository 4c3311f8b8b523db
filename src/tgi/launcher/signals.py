"""SIGINT, SIGTERM and SIGHUP as a queue that the main thread waits at. Knows no processes."""

from __future__ import annotations

import contextlib
import logging
import signal
from queue import Empty, SimpleQueue
from types import FrameType

logger = logging.getLogger("tgi.launcher")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopAsked(Exception):
    """A signal asked the launcher to stop."""


class StopSignals:
    """Takes the signals at `with`, gives them back after."""

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
        """End the running tick early: something has happened to a child. From any thread."""
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
