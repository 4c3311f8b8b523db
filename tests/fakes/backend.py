"""A scripted Backend behind the HTTP doors: plays tokens from a script, or as a test says them one by one.

Lives on the server's event loop; the methods that a test calls may be called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tgi.enums import FinishReason
from tgi.errors import TgiError
from tgi.router.backend import Finish, Flushed, PromptToken, Sink, Times, TokenEvent, TopToken
from tgi.router.validation.request import ValidRequest

WAIT_S = 20.0
EOS_TEXT, EOS_ID = "</s>", 257


@dataclass(frozen=True, slots=True)
class Said:
    """One token."""

    text: str
    id: int = 7
    special: bool = False
    logprob: float = -0.25
    top: tuple[TopToken, ...] = ()


EOS = Said(EOS_TEXT, EOS_ID, special=True, logprob=-0.5)


@dataclass(frozen=True, slots=True)
class Script:
    tokens: Sequence[Said]
    reason: FinishReason = FinishReason.EOS_TOKEN
    stop: str | int | None = None
    num_cached: int = 0
    prompt: Sequence[PromptToken] = ()  # else that of the request, where it wants logprobs of it
    error: TgiError | None = None  # instead of the last token
    total_s: float = 11 / 64  # from the request's arrival


# What fakes/app.py's tokenizer knows as tokens of their own.
HELLO = Script((Said("Hello", 259), Said(" world", 260), EOS))


def times_of(request: ValidRequest, total_s: float) -> Times:
    """Always the same: validation 15 ms, queue 31 ms, inference 125 ms, total 171 ms (if not told otherwise), all
    rounded down."""
    at = request.received_at
    return Times(at, at + 1 / 64, at + 3 / 64, at + 4 / 64, at + total_s)


def prompt_of(request: ValidRequest) -> list[PromptToken]:
    """What a request gets that wants the logprobs of its prompt (of bytes): always -0.5."""
    if not request.prompt_logprobs:
        return []
    ids = memoryview(request.prompt_ids).cast("I")
    return [PromptToken(token_id, chr(token_id), -0.5 if index else None) for index, token_id in enumerate(ids)]


@dataclass
class Playing:
    """One scheduled request; also its Ticket."""

    request: ValidRequest
    sink: Sink
    backend: ScriptedBackend
    loop: asyncio.AbstractEventLoop
    text: str = ""
    num_tokens: int = 0
    over: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.over = True
        self.cancelled.set()

    def say(self, *tokens: Said | str, script: Script | None = None) -> None:
        """From any thread: the next tokens, all in one turn of the loop; the end when `script` is given."""
        said = [Said(token) if isinstance(token, str) else token for token in tokens]
        self.loop.call_soon_threadsafe(self._say, said, script)

    def fail(self, error: TgiError) -> None:
        self.loop.call_soon_threadsafe(self._fail, error)

    def play(self, script: Script, index: int = 0) -> None:
        """On the loop: one token a turn, as steps would bring them."""
        if self.over:
            return
        if index == 0 and (prompt := script.prompt or prompt_of(self.request)):
            self.sink.prompt(list(prompt))
        is_last = index == len(script.tokens) - 1
        if script.error is not None and (is_last or not script.tokens):
            self._fail(script.error)
            return
        self._say([script.tokens[index]], script if is_last else None)
        if not is_last:
            self.loop.call_soon(self.play, script, index + 1)

    def _say(self, tokens: Sequence[Said], script: Script | None) -> None:
        for position, token in enumerate(tokens):
            if self.over:
                return
            self.num_tokens += 1
            if not token.special:
                self.text += token.text
            event = TokenEvent(token.id, token.text, token.logprob, token.special, token.top)
            if script is not None and position == len(tokens) - 1:
                self.over = True
                event.finish = self._finish(script)
            self.sink.token(event)

    def _fail(self, error: TgiError) -> None:
        if not self.over:
            self.over = True
            self.sink.fail(error)

    def _finish(self, script: Script) -> Finish:
        sampling = self.request.sampling
        return Finish(
            reason=script.reason,
            text=self.text,
            num_generated=self.num_tokens,
            num_prompt=self.request.num_prompt_tokens,
            num_cached=script.num_cached,
            seed=sampling.seed if sampling.do_sample else None,
            stop=script.stop,
            times=times_of(self.request, script.total_s),
        )


class ScriptedBackend:
    """`script` None: a test speaks for the model, through `next_playing()`."""

    def __init__(self, script: Script | Callable[[ValidRequest], Script] | None = HELLO) -> None:
        self.script = script
        self.healthy = True
        self.flushed = Flushed(0, 0)  # what flush_cache() answers
        self.refusal: TgiError | None = None  # raised by schedule()
        self.playing: list[Playing] = []
        self._condition = threading.Condition()
        self._num_taken = 0

    @property
    def requests(self) -> list[ValidRequest]:
        return [playing.request for playing in self.playing]

    def schedule(self, request: ValidRequest, sink: Sink) -> Playing:
        if self.refusal is not None:
            raise self.refusal
        loop = asyncio.get_running_loop()
        playing = Playing(request, sink, self, loop)
        with self._condition:
            self.playing.append(playing)
            self._condition.notify_all()
        if self.script is not None:
            script = self.script(request) if callable(self.script) else self.script
            loop.call_soon(playing.play, script)
        return playing

    async def is_healthy(self) -> bool:
        return self.healthy

    def flush_cache(self) -> Flushed:
        return self.flushed

    def next_playing(self) -> Playing:
        """Waits for the next request that no earlier call has returned."""
        with self._condition:
            arrived = self._condition.wait_for(lambda: len(self.playing) > self._num_taken, WAIT_S)
            assert arrived, "no further request was scheduled"
            self._num_taken += 1
            return self.playing[self._num_taken - 1]
