"""What an answer looks like in Anthropic's messages: one object, or the events of a stream, made of the same parts.

Knows neither requests nor how an answer came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from tgi.enums import FinishReason
from tgi.errors import TgiError
from tgi.router.api.chat_frames import AnswerReader
from tgi.router.api.errors import anthropic_body
from tgi.router.api.openai_answer import cut_at_text, encode
from tgi.router.api.runs import Run, Runs, plain_text, shown
from tgi.router.api.translation import named_event
from tgi.router.backend import Finish, PromptToken, TokenEvent
from tgi.router.chat.answer import AnswerParser
from tgi.router.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from tgi.router.infer import Collector
from tgi.router.schema.messages import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputBlock,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of an answer before it comes."""

    id: str
    model: str
    request_id: str
    num_prompt: int  # tokens
    max_tokens: int  # that the request asked for; fewer may fit

    def answer(self, content: list[OutputBlock], end: MessageEnd | None, usage: MessagesUsage) -> MessageAnswer:
        return MessageAnswer(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=None if end is None else end.stop_reason,
            stop_sequence=None if end is None else end.stop_sequence,
            usage=usage,
        )

    def end(self, reader: AnswerReader, finish: Finish) -> MessageEnd:
        if finish.reason is FinishReason.LENGTH:
            is_full = finish.num_generated >= self.max_tokens
            return MessageEnd("max_tokens" if is_full else "model_context_window_exceeded", None)
        if reader.is_calling(finish):
            return MessageEnd("tool_use", None)
        if isinstance(finish.stop, str):
            return MessageEnd("stop_sequence", finish.stop)
        return MessageEnd("end_turn", None)

    def signature(self) -> str:
        """For clients that keep thoughts only with one."""
        return self.id


def message(look: Look, collector: Collector, parser: AnswerParser | None) -> MessageAnswer:
    """The object of a request whose answer is complete."""
    reader, runs = AnswerReader(parser, keep_special=False), Runs()
    for event in collector.events:
        for part in shown(reader.read(event)):
            runs.add(part)
    finish = collector.finish
    content = [_block(look, run) for run in runs.all]
    return look.answer(content, look.end(reader, finish), _usage(finish, reader.num_reasoning))


class MessageFrames:
    """The events of a stream."""

    def __init__(self, look: Look, parser: AnswerParser | None) -> None:
        self._look = look
        self._reader = AnswerReader(parser, keep_special=False)
        self._runs = Runs()
        self._has_begun = False
        self._text: tuple[bytes, bytes] | None = None  # around a delta of the block that is open, if that is a text

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        """Messages tell nothing of their prompt."""

    def token(self, event: TokenEvent) -> bytes:
        parts = self._reader.read(event)
        if self._text is not None and event.finish is None and (text := plain_text(parts)):
            return b"%b%b%b" % (self._text[0], encode(text), self._text[1])
        events = [] if self._has_begun else self._begin()
        for part in shown(parts):
            if self._runs.add(part):
                events += self._turn_to(part)
            if not isinstance(part, CallBegin):
                events.append(ContentBlockDelta(self._last, _delta(part)))
        if event.finish is not None:
            events += self._end(event.finish)
        return b"".join(map(named_event, events))

    def failure(self, error: TgiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_body(error, self._look.request_id)

    def close(self) -> bytes:
        return b""

    @property
    def _last(self) -> int:
        """Index of the block that is open."""
        return len(self._runs.all) - 1

    def _begin(self) -> list[Struct]:
        """What was found in the cache is told at the end only."""
        self._has_begun = True
        usage = MessagesUsage(input_tokens=self._look.num_prompt, cache_read_input_tokens=0, output_tokens=1)
        return [MessageStart(self._look.answer([], None, usage)), Ping()]

    def _turn_to(self, part: Part) -> list[Struct]:
        """Close the block before the one that begins with `part`."""
        empty = ContentBlockDelta(self._last, TextDelta(""))
        self._text = cut_at_text(named_event(empty), b"text") if isinstance(part, Content) else None
        return [*self._close_block(self._last - 1), ContentBlockStart(self._last, _empty_block(part))]

    def _close_block(self, index: int) -> list[Struct]:
        if index < 0:
            return []
        if self._runs.all[index].kind is Reasoning:
            return [ContentBlockDelta(index, SignatureDelta(self._look.signature())), ContentBlockStop(index)]
        return [ContentBlockStop(index)]

    def _end(self, finish: Finish) -> list[Struct]:
        end = MessageDelta(self._look.end(self._reader, finish), _usage(finish, self._reader.num_reasoning))
        return [*self._close_block(self._last), end, MessageStop()]


def _usage(finish: Finish, num_reasoning: int | None) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=finish.num_prompt - finish.num_cached,
        cache_read_input_tokens=finish.num_cached,
        output_tokens=finish.num_generated,
        output_tokens_details=UNSET if num_reasoning is None else OutputTokensDetails(num_reasoning),
    )


def _block(look: Look, run: Run) -> OutputBlock:
    if run.call is not None:
        return ToolUseBlock(run.call.id, run.call.name, _object(run.text))
    return ThinkingBlock(run.text, look.signature()) if run.kind is Reasoning else TextBlock(run.text)


def _object(arguments: str) -> dict[str, Any]:
    """What is no JSON object, most often since the length has cut it, is an empty one: the type allows nothing else."""
    try:
        return msgspec.json.decode(arguments, type=dict)
    except (msgspec.DecodeError, RecursionError):
        return {}


def _empty_block(part: Part) -> OutputBlock:
    match part:
        case CallBegin(_, call_id, name):
            return ToolUseBlock(call_id, name, {})
        case Reasoning():
            return ThinkingBlock("", "")
        case _:
            return TextBlock("")


def _delta(part: Reasoning | Content | CallArguments) -> ThinkingDelta | TextDelta | InputJsonDelta:
    match part:
        case Reasoning(text):
            return ThinkingDelta(text)
        case Content(text):
            return TextDelta(text)
        case CallArguments(_, text):
            return InputJsonDelta(text)
