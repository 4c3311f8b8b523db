"""Server-sent events written by whoever produces them: no task, queue or future per token.

`EventStream` is a response and takes what its answers' sinks get. The head leaves with the first event, so an error
before it still has a real status. A client that does not read gets its tokens later, rendered when its socket drains.
Knows no JSON: `Frames` renders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from math import ceil
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tgi.errors import TgiError
from tgi.router.api.middleware import RAW_SEND
from tgi.router.backend import PromptToken, TokenEvent
from tgi.router.infer import Call
from tgi.router.validation.request import ValidRequest

logger = logging.getLogger(__name__)

ABORT = "tgi.abort"
"""Scope extension: cut the connection now, what is not sent is lost. Closing waits for the client, who never reads."""

COMMENT = b":\n\n"

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

LONG_PROMPT = 512
"""Tokens. To render more, alternatives included, may take milliseconds."""

_Item = TokenEvent | TgiError | Sequence[PromptToken]

# A drained client is caught up in portions, so that rendering its backlog holds up nobody.
_CATCH_UP = 256


class Frames(Protocol):
    """How one answer looks in a stream: every call gives the bytes of whole events, in the order of the answer."""

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        """Before the first token, where the request asked for it. A long one comes in a thread."""
        ...

    def token(self, event: TokenEvent) -> bytes: ...

    def failure(self, error: TgiError) -> bytes:
        """Closes the whole stream, whatever its other answers are at."""
        ...

    def close(self) -> bytes:
        """What follows the last event of the stream's last answer: this one."""
        ...


class _Answer:
    """The Sink of one of a stream's answers."""

    __slots__ = ("_frames", "_stream")

    def __init__(self, stream: EventStream, frames: Frames) -> None:
        self._stream = stream
        self._frames = frames

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        self._stream.take_prompt(self._frames, tokens)

    def token(self, event: TokenEvent) -> None:
        self._stream.take(self._frames, event)

    def fail(self, error: TgiError) -> None:
        self._stream.take(self._frames, error)


class EventStream:
    """The response of a streamed request (an ASGI application), and where the events of its answers come together."""

    def __init__(
        self,
        call: Call,
        answers: Sequence[tuple[ValidRequest, Frames]],
        pulse: Pulse,
        headers: Iterable[tuple[bytes, bytes]],
        on_early_error: Callable[[TgiError], Response],
    ) -> None:
        """`on_early_error` answers an error that comes before the first event."""
        self._call = call
        self._answers = answers
        self._num_open = len(answers)  # answers whose end has not been rendered
        self._pulse = pulse
        self._headers = [*HEADERS, *headers]
        self._on_early_error = on_early_error
        self._backlog: list[tuple[Frames, _Item]] | None = None  # None: the client keeps up
        self._catching_up: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_over = False
        self.quiet_ticks = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send_head = send
        self._send = scope.get(RAW_SEND, send)
        self._pulse.add(self)
        try:
            with self._call:
                for request, frames in self._answers:
                    self._call.schedule(request, _Answer(self, frames))
                # The one wait of a stream: the client is gone, or (the server says so too) the response is complete.
                while (await receive())["type"] != "http.disconnect":
                    pass
        finally:
            self._is_over = True
            self._pulse.discard(self)
            self._call.cancel()
            if self._catching_up is not None:
                self._catching_up.cancel()

    # The backend's side.

    def take_prompt(self, frames: Frames, tokens: Sequence[PromptToken]) -> None:
        """The prompt of one of the answers. All events wait until a long one is rendered, beside the event loop."""
        if self._backlog is not None:
            self._backlog.append((frames, tokens))
        elif len(tokens) <= LONG_PROMPT:
            frames.prompt(tokens)
        else:
            self._fall_behind(asyncio.to_thread(frames.prompt, tokens))

    def take(self, frames: Frames, item: TokenEvent | TgiError) -> None:
        """The next event of one of the answers, or the error that ends them all."""
        if self._backlog is not None:
            self._backlog.append((frames, item))
        elif self._is_open:
            data = self._render(frames, item)
            if data or not self._num_open:  # a parser may hold many tokens back: that is silence
                self.quiet_ticks = 0
                self._step(self._send(_body(data, self._num_open > 0)))
        elif not self._is_over:
            if isinstance(item, TgiError):
                self._step(self._on_early_error(item)(self._scope, self._receive, self._send_head))
            else:
                self._is_open = True
                self._step(self._open(frames, item))

    # The pulse's side.

    def tick(self, keep_alive_ticks: int, stall_ticks: int) -> None:
        """Time passes: a comment after silence, the end for a client that has taken nothing for long."""
        self.quiet_ticks += 1
        if self._backlog is not None:
            if self.quiet_ticks >= stall_ticks:
                self._abort()
        elif self._is_open and self.quiet_ticks >= keep_alive_ticks:
            self.quiet_ticks = 0
            self._step(self._send(_body(COMMENT, True)))

    def _abort(self) -> None:
        self._is_over = True
        self._backlog = []
        self._call.cancel()
        abort = self._scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()

    async def _open(self, frames: Frames, first: TokenEvent) -> None:
        data = self._render(frames, first)
        await self._send_head({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send(_body(data, self._num_open > 0))

    def _render(self, frames: Frames, item: TokenEvent | TgiError) -> bytes:
        """To be called in the order of the stream. `_num_open` is 0 once the stream's last bytes are rendered."""
        if isinstance(item, TgiError):
            self._num_open = 0
            return frames.failure(item)
        data = frames.token(item)
        if item.finish is None:
            return data
        self._num_open -= 1
        return data if self._num_open else data + frames.close()

    def _step(self, sending: Any) -> None:
        """Run `sending` now. Only if the server makes it wait for the client, a task takes over."""
        try:
            waited = sending.send(None)
        except StopIteration:
            return
        except OSError:  # the connection broke; the handler hears of it by itself
            self._is_over = True
            return
        self._fall_behind(_Rest(sending, waited))

    def _fall_behind(self, first: Awaitable[None]) -> None:
        """What comes waits until `first` is done."""
        self._backlog = []
        self.quiet_ticks = 0
        self._catching_up = asyncio.get_running_loop().create_task(self._catch_up(first))

    async def _catch_up(self, first: Awaitable[None]) -> None:
        """Finish what waits, then render and send what came meanwhile, until the client keeps up again."""
        try:
            await first
            while self._backlog and not self._is_over:
                self.quiet_ticks = 0
                portion = self._backlog[:_CATCH_UP]
                del self._backlog[:_CATCH_UP]
                await self._forward(portion)
                await asyncio.sleep(0)
        except OSError:
            self._is_over = True
        except Exception:
            logger.exception("a stream could not be rendered; its connection is cut")
            self._abort()
        self._backlog = None
        self._catching_up = None

    async def _forward(self, portion: list[tuple[Frames, _Item]]) -> None:
        data: list[bytes] = []
        for frames, item in portion:
            if isinstance(item, TgiError) and not self._is_open and not data:
                self._is_over = True
                await self._on_early_error(item)(self._scope, self._receive, self._send_head)
                return
            if isinstance(item, TokenEvent | TgiError):
                data.append(self._render(frames, item))
            else:
                await asyncio.to_thread(frames.prompt, item)
        if not data:
            return
        if not self._is_open:
            self._is_open = True
            await self._send_head({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send(_body(b"".join(data), self._num_open > 0))


class Pulse:
    """One timer for all open streams. Runs while there are any."""

    def __init__(self, keep_alive_s: float = 15.0, stall_s: float = 60.0) -> None:
        self._tick_s = min(1.0, keep_alive_s / 4, stall_s / 4)
        self._keep_alive_ticks = ceil(keep_alive_s / self._tick_s)
        self._stall_ticks = ceil(stall_s / self._tick_s)
        self._streams: set[EventStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)
        if self._timer is None:
            self._arm()

    def discard(self, stream: EventStream) -> None:
        self._streams.discard(stream)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._beat)

    def _beat(self) -> None:
        self._arm()
        for stream in tuple(self._streams):
            stream.tick(self._keep_alive_ticks, self._stall_ticks)


class _Rest:
    """The rest of a coroutine that was stepped once outside a task and yielded `waited`."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waited: Any) -> None:
        self._coroutine = coroutine
        self._waited = waited

    def __await__(self) -> Generator[Any, Any, None]:
        waited = self._waited
        while True:
            # `waited` is a future that its own __await__ has marked as being waited for: the task takes it as it is.
            try:
                yield waited
            except BaseException as error:
                step = self._coroutine.throw
                argument: Any = error
            else:
                step, argument = self._coroutine.send, None
            try:
                waited = step(argument)
            except StopIteration:
                return


def _body(data: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
