"""What answers of chats and of text completions have in common on the wire: their head, reasons, usage, stream events.

Knows neither kind's choices.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tgi.enums import FinishReason
from tgi.errors import InvalidRequest, TgiError
from tgi.router.api.errors import openai_body
from tgi.router.api.services import Services
from tgi.router.backend import Finish, TokenEvent
from tgi.router.schema.chat import CompletionTokensDetails, PromptTokensDetails, StreamOptions, Usage

encode = msgspec.json.Encoder().encode

MAX_MODEL_NAME = 512  # characters

DONE = b"data: [DONE]\n\n"

FINISH_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS_TOKEN: "stop", FinishReason.STOP_SEQUENCE: "stop"}


@dataclass(frozen=True, slots=True)
class Head:
    """The first keys of every object of one answer."""

    id: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def model_name(services: Services, model: str | None) -> str:
    """`model` as the client named it: any name is echoed, but TGI's for "the one that is served" is resolved.

    Raises InvalidRequest for one that is no name: it may stand in every event of a stream.
    """
    if model in (None, "", "tgi"):
        return services.info.model_id
    if len(model) > MAX_MODEL_NAME:
        raise InvalidRequest(f"`model` has {len(model)} characters; a name has at most {MAX_MODEL_NAME}", "model")
    return model


def head_of(services: Services, prefix: str, model: str | None) -> Head:
    """Raises InvalidRequest."""
    return Head(
        id=f"{prefix}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=model_name(services, model),
        system_fingerprint=services.system_fingerprint,
    )


class Tally:
    """The usage of one request: each prompt counts once, the tokens of all its answers count."""

    def __init__(self, prompt_lens: Sequence[int], is_scoring: bool = False) -> None:
        """`prompt_lens`: tokens of each prompt. `is_scoring`: no answer is wanted, its tokens do not count."""
        self._is_scoring = is_scoring
        self._num_prompt = sum(prompt_lens)
        self._num_cached: list[int | None] = [None] * len(prompt_lens)
        self._num_generated = 0
        self._num_reasoning: int | None = None

    def add(self, finish: Finish, prompt: int = 0, num_reasoning: int | None = None) -> None:
        """One answer to the prompt of this index. `num_reasoning` None: nobody looked for thinking text."""
        self._num_generated += 0 if self._is_scoring else finish.num_generated
        if num_reasoning is not None:
            self._num_reasoning = (self._num_reasoning or 0) + num_reasoning
        # Further answers to a prompt find in the cache what the first of them has read.
        cached = self._num_cached[prompt]
        self._num_cached[prompt] = finish.num_cached if cached is None else min(cached, finish.num_cached)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_generated,
            total_tokens=self._num_prompt + self._num_generated,
            prompt_tokens_details=PromptTokensDetails(sum(cached or 0 for cached in self._num_cached)),
            completion_tokens_details=UNSET
            if self._num_reasoning is None
            else CompletionTokensDetails(self._num_reasoning),
        )


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Where a stream tells its usage."""

    at_end: bool  # in a chunk of its own
    in_chunks: bool  # of its choice, so far, in each chunk


def stream_usage(options: StreamOptions | None) -> StreamUsage:
    at_end = bool(options and options.include_usage)
    return StreamUsage(at_end, at_end and bool(options and options.continuous_usage_stats))


def usage_so_far(num_prompt: int, num_generated: int) -> Usage:
    return Usage(num_prompt, num_generated, num_prompt + num_generated)


def event_of(value: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode(value)


def failure(error: TgiError) -> bytes:
    return b"data: %b\n\n%b" % (openai_body(error), DONE)


def cut_at_text(whole: bytes, key: bytes) -> tuple[bytes, bytes]:
    """What stands before and behind the empty text of `key` in an event: plain events differ in that text alone."""
    head, mark, tail = whole.rpartition(b'"%b":""' % key)
    assert mark
    return head + mark[:-2], tail


def visible_text(event: TokenEvent, keep_special: bool) -> str:
    """What a token adds to the answer. With `keep_special` that is a special token's own text too, except that of the
    token that ends the answer."""
    if not event.special:
        return event.text
    ends = event.finish is not None and event.finish.reason is not FinishReason.LENGTH
    return event.text if keep_special and not ends else ""


def stop_reason_of(finish: Finish) -> str | int | UnsetType:
    return UNSET if finish.stop is None else finish.stop


def seed_of(finish: Finish) -> int | UnsetType:
    return UNSET if finish.seed is None else finish.seed


def joined(finishes: Sequence[Finish]) -> Finish:
    """Of several answers to one prompt: the times of the last to end, the tokens of all."""
    last = max(finishes, key=lambda finish: finish.times.finished)
    return replace(last, num_generated=sum(finish.num_generated for finish in finishes))
