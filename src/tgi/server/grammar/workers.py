"""A few threads that take jobs in their order. Knows nothing of grammars."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Workers:
    """Daemons: a job that never ends must not keep the process from ending. Started with the first job."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started = False

    def submit(self, job: Callable[[], None]) -> None:
        """From one thread only."""
        if not self._started:
            self._started = True
            for number in range(self._count):
                threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException:  # panics of the library are no Exceptions
                log.exception("a job of %s failed", self._name)
