"""Scheduler: the Backend. Reads a shard's Steps into the core and writes the core's Commands; reconnects.

The only part of this room that knows asyncio. What is decided, and why, is in core.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from tgi.enums import Phase
from tgi.errors import StartupError, TgiError, Unavailable
from tgi.router.backend import Flushed, Sink
from tgi.router.scheduling.core import SchedulerConfig, SchedulerCore
from tgi.router.scheduling.entry import AnswerText, Entry, Vocabulary
from tgi.router.scheduling.stats import SchedulerStats
from tgi.router.validation.request import ValidRequest
from tgi.shard_client.messages import Command, Health, Step
from tgi.text.stream import TextStream
from tgi.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SLICE_S = 0.005  # longest turn of the loop that handling a Step may take
RECONNECT_S = (0.02, 1.0)  # first and longest pause between two attempts
REMINDER_S = 30.0  # between two lines about a shard that is away
HEALTH_TIMEOUT_S = 3.0  # Health comes from a thread of its own, however busy the shard is; probes do not wait for long
EXPIRE_S = 0.25  # how often the queue is searched for the overdue


class Stream(Protocol):
    """The part of tgi.shard_client.client.ShardStream that is used here."""

    def send(self, command: Command) -> None: ...
    def __aiter__(self) -> AsyncIterator[Step]: ...
    async def close(self) -> None: ...


class Shard(Protocol):
    """The part of tgi.shard_client.client.ShardClient that is used here."""

    def stream(self) -> Stream: ...
    async def health(self, timeout_s: float, /) -> Health: ...


class Scheduler:
    """One per router. `start()` before use, `close()` at the end; in between it survives the shard.

    `stats` is what metrics read. `prepare` runs before each stream but the first: it has a shard that was started again
    size its cache, and may take minutes. Raises Unavailable or StartupError when there is no such shard yet.
    """

    def __init__(
        self,
        shard: Shard,
        tokenizer: Tokenizer | Vocabulary,
        config: SchedulerConfig,
        *,
        open_text: Callable[[ValidRequest], AnswerText] | None = None,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if open_text is None:
            assert isinstance(tokenizer, Tokenizer), "another vocabulary needs its own open_text"
            open_text = _text_opener(tokenizer)
        self.core = SchedulerCore(config, tokenizer, open_text)
        self._shard = shard
        self._config = config
        self._prepare = prepare
        self._stream: Stream | None = None  # while open and past its Step 0
        self._opened = asyncio.Event()
        self._is_lost = False  # the shard does not answer, as opposed to a stream that we ended ourselves
        self._is_ending = False
        self._down_since = self._told_at = time.monotonic()
        self._flush_is_due = False
        self._closing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def stats(self) -> SchedulerStats:
        return self.core.stats

    async def start(self, timeout_s: float = 60.0) -> None:
        """Open the stream. Raises Unavailable when the shard does not answer in time."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._expire())]
        try:
            await asyncio.wait_for(self._opened.wait(), timeout_s)
        except TimeoutError:
            await self.close()
            raise Unavailable(f"the model server did not open a stream within {timeout_s:g} s") from None

    def stop_waiting(self) -> None:
        """The server ends when its requests have: those of a lost shard fail with Unavailable, now or once lost."""
        self._is_ending = True
        self._fail_lost()

    async def close(self) -> None:
        """Every request that is left fails with Unavailable."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.core.fail_all(Unavailable("the server is shutting down"))

    # Backend

    def schedule(self, request: ValidRequest, sink: Sink) -> Entry:
        if self._is_long_gone or (self._is_lost and self._is_ending):
            raise Unavailable("the model server is not there")
        entry = self.core.submit(request, sink, cancel=self._cancel)
        self._flush_soon()
        return entry

    async def is_healthy(self, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        if self._stream is None:
            return False
        try:
            health = await self._shard.health(timeout_s)
        except (Unavailable, StartupError):  # whatever the shard says instead: it is not well
            return False
        return not health.is_hung and health.phase != Phase.FAILED

    def flush_cache(self) -> Flushed:
        return self.core.flush_cache()

    # the stream

    @property
    def _is_long_gone(self) -> bool:
        return self._stream is None and time.monotonic() - self._down_since > self._config.unavailable_after_s

    def _cancel(self, entry: Entry) -> None:
        self.core.cancel(entry)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """One Command for all that happens in this turn of the loop."""
        if not self._flush_is_due and self._stream is not None:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._stream is not None:
            try:
                command = self.core.next_command()
                if command is not None:
                    self._stream.send(command)
                if self.core.needs_new_stream:
                    self._end(self._stream)
            except Exception:
                logger.exception("a command could not be sent; running requests start again from what they have")
                self._give_up(self._stream)

    async def _run(self) -> None:
        pause = RECONNECT_S[0]
        while True:
            keep_memory = True
            stream: Stream | None = None
            try:
                if self._prepare is not None and self._opened.is_set():
                    await self._prepare()
                stream = self._shard.stream()
                async for step in stream:
                    await self._handle(stream, step)
                    if step.opening is None:
                        pause = RECONNECT_S[0]
            except (Unavailable, StartupError) as error:
                self._tell(error)
                self._is_lost = True
                if isinstance(error, StartupError) and self._is_long_gone:  # it is there, and says that it cannot
                    self.core.fail_all(Unavailable(f"the model server cannot go on: {error}"))
            except Exception:
                logger.exception("handling a step failed; running requests start again from what they have")
                keep_memory = False
            finally:
                self._lose(keep_memory)
                self._fail_lost()
                if stream is not None:
                    await stream.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, RECONNECT_S[1])

    def _tell(self, error: TgiError) -> None:
        """Of a loss at once, and then now and then as long as it lasts."""
        now = time.monotonic()
        if self._stream is not None:
            logger.warning("lost the model server, running requests wait: %s", error)
        elif now - self._told_at >= REMINDER_S:
            logger.warning("no model server since %.0f s, requests wait: %s", now - self._down_since, error)
        else:
            return
        self._told_at = now

    async def _handle(self, stream: Stream, step: Step) -> None:
        deadline = time.perf_counter() + SLICE_S
        for _ in self.core.step_work(step):
            if time.perf_counter() > deadline:
                await asyncio.sleep(0)
                deadline = time.perf_counter() + SLICE_S
        if step.opening is not None:
            if self._opened.is_set() and self._is_lost:
                away_s = time.monotonic() - self._down_since
                logger.info("the model server is back after %.1f s, running requests go on", away_s)
            self._stream = stream
            self._is_lost = False
            self._opened.set()
        self._flush()

    def _give_up(self, stream: Stream) -> None:
        """After a fault of ours: what the core believes of memory may be wrong, so it starts over on a new stream."""
        self._lose(keep_memory=False)
        self._end(stream)

    def _end(self, stream: Stream) -> None:
        """Close a stream, which ends the loop over its steps; a new one follows."""
        self._closing = asyncio.get_running_loop().create_task(stream.close())

    def _lose(self, keep_memory: bool) -> None:
        if self._stream is not None:
            self._stream = None
            self._down_since = time.monotonic()
        self.core.stream_lost(keep_memory)

    def _fail_lost(self) -> None:
        if self._is_lost and self._is_ending:
            self.core.fail_all(Unavailable("it was lost, and the server is shutting down"))

    async def _expire(self) -> None:
        while self._config.queue_timeout_s is not None:
            await asyncio.sleep(EXPIRE_S)
            self.core.expire()


def _text_opener(tokenizer: Tokenizer) -> Callable[[ValidRequest], AnswerText]:
    def open_text(request: ValidRequest) -> AnswerText:
        stopping = request.stopping
        return TextStream(
            tokenizer, request.prompt_ids, stopping.stop_strings, stopping.include_stop, stopping.min_new_tokens
        )

    return open_text
