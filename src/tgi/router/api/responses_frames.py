"""What an answer looks like in OpenAI's responses: one object, or the events of a stream, made of the same parts.

Knows neither requests nor how an answer came about.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tgi.enums import FinishReason
from tgi.errors import InvalidRequest, Overloaded, TgiError
from tgi.router.api.chat_frames import AnswerReader
from tgi.router.api.errors import fault_of
from tgi.router.api.logprobs import TokenBytes, chat_logprob
from tgi.router.api.openai_answer import cut_at_text, encode
from tgi.router.api.runs import Run, Runs, plain_text, shown
from tgi.router.api.translation import named_event
from tgi.router.backend import Finish, PromptToken, TokenEvent
from tgi.router.chat.answer import AnswerParser
from tgi.router.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from tgi.router.infer import Collector
from tgi.router.schema.chat import TokenLogprob
from tgi.router.schema.responses import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputReasoningDetails,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseErrorEvent,
    ResponseFailed,
    ResponseFault,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponsesUsage,
)

_PREFIXES = {Reasoning: "rs", Content: "msg", CallBegin: "fc"}


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of an answer before it comes, and what a request wants to see of it."""

    start: ResponseObject  # as it is before the first token
    vocabulary: TokenBytes
    num_alternatives: int | None  # log probabilities with that many alternatives; None: no log probabilities


def response(look: Look, collector: Collector, parser: AnswerParser | None) -> ResponseObject:
    """The object of a request whose answer is complete."""
    reading = _Reading(look, parser)
    for event in collector.events:
        for part in reading.parts(event):
            reading.add(part)
    return reading.response(collector.finish)


class _Reading:
    """The tokens of one answer -> the items of its output."""

    def __init__(self, look: Look, parser: AnswerParser | None) -> None:
        self._look = look
        self._reader = AnswerReader(parser, keep_special=False)
        self._runs = Runs()
        self._logprobs: list[list[TokenLogprob]] = []  # for each run
        self._untold: list[TokenLogprob] = []  # of tokens that have not shown anything yet

    @property
    def num_items(self) -> int:
        return len(self._runs.all)

    def parts(self, event: TokenEvent) -> list[Part]:
        """What the token says. An answer that says nothing at all is an empty text."""
        if self._look.num_alternatives is not None and not event.special:
            self._untold.append(chat_logprob(self._look.vocabulary, event, self._look.num_alternatives))
        parts = shown(self._reader.read(event))
        is_empty = event.finish is not None and not parts and not self._runs.all
        return [Content("")] if is_empty else parts

    def add(self, part: Part) -> tuple[bool, list[TokenLogprob]]:
        """Does an item of the output begin with it, and what is to be told of its tokens?"""
        begins = self._runs.add(part)
        if begins:
            self._logprobs.append([])
        logprobs = self._untold if isinstance(part, Content) else []
        if self._untold:
            self._logprobs[-1] += logprobs
            self._untold = []
        return begins, logprobs

    def run(self, index: int) -> Run:
        return self._runs.all[index]

    def item_id(self, index: int) -> str:
        response_id = self._look.start.id.removeprefix("resp_")
        return f"{_PREFIXES[self.run(index).kind]}_{response_id}{index:02d}"

    def item(self, index: int, status: str = "completed") -> OutputItem:
        run, item_id = self.run(index), self.item_id(index)
        if run.call is not None:
            return FunctionCallItem(
                id=item_id, status=status, call_id=run.call.id, name=run.call.name, arguments=run.text
            )
        if run.kind is Reasoning:
            return ReasoningItem(id=item_id, status=status, content=[ReasoningText(run.text)])
        return MessageItem(id=item_id, status=status, content=[self.text_part(index)])

    def text_part(self, index: int) -> OutputText:
        return OutputText(self.run(index).text, logprobs=self._logprobs[index])

    def output(self, last_status: str = "completed") -> list[OutputItem]:
        last = self.num_items - 1
        return [self.item(index, last_status if index == last else "completed") for index in range(self.num_items)]

    def response(self, finish: Finish) -> ResponseObject:
        """Of an answer that has come to its end."""
        is_cut = finish.reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        return replace(
            self._look.start,
            status=status,
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self.output(status),
            usage=_usage(finish, self._reader.num_reasoning),
        )


class ResponseFrames:
    """The events of a stream, numbered from 0."""

    def __init__(self, look: Look, parser: AnswerParser | None) -> None:
        self._look = look
        self._reading = _Reading(look, parser)
        self._num_events = 0
        self._text: tuple[bytes, bytes, bytes] | None = None  # around number and delta, while plain text comes

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        """Responses tell nothing of their prompt."""

    def token(self, event: TokenEvent) -> bytes:
        parts = self._reading.parts(event)
        if self._text is not None and event.finish is None and (text := plain_text(parts)):
            self._reading.run(-1).pieces.append(text)
            return b"%b%d%b%b%b" % (self._text[0], self._number(), self._text[1], encode(text), self._text[2])
        events = [] if self._num_events else self._begin()
        for part in parts:
            begins, logprobs = self._reading.add(part)
            if begins:
                events += self._turn_to(part)
            if not isinstance(part, CallBegin):
                events.append(self._delta(part, logprobs))
        if event.finish is not None:
            events += self._end(event.finish)
        return b"".join(map(named_event, events))

    def failure(self, error: TgiError) -> bytes:
        fault = fault_of(error)
        told = ResponseErrorEvent(self._number(), fault.code, fault.message, fault.param, fault.status_on_v1)
        failed = replace(
            self._look.start,
            status="failed",
            error=ResponseFault(_fault_code(error), fault.message),
            output=self._reading.output("incomplete"),
        )
        return named_event(told) + named_event(ResponseFailed(self._number(), failed))

    def close(self) -> bytes:
        return b""

    def _number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _begin(self) -> list[Struct]:
        start = self._look.start
        return [ResponseCreated(self._number(), start), ResponseInProgress(self._number(), start)]

    def _turn_to(self, part: Part) -> list[Struct]:
        """Close the item before the one that begins with `part`."""
        index = self._reading.num_items - 1
        events = self._close_item(index - 1, "completed")
        item_id = self._reading.item_id(index)
        is_plain = isinstance(part, Content) and self._look.num_alternatives is None
        self._text = _around_text(OutputTextDelta(0, item_id, index, 0, "", [])) if is_plain else None
        match part:
            case CallBegin(_, call_id, name):
                item = FunctionCallItem(id=item_id, status="in_progress", call_id=call_id, name=name, arguments="")
                return [*events, OutputItemAdded(self._number(), index, item)]
            case Reasoning():
                item, empty = ReasoningItem(id=item_id, status="in_progress", content=[]), ReasoningText("")
            case _:
                item, empty = MessageItem(id=item_id, status="in_progress", content=[]), OutputText("")
        events.append(OutputItemAdded(self._number(), index, item))
        events.append(ContentPartAdded(self._number(), item_id, index, 0, empty))
        return events

    def _delta(self, part: Reasoning | Content | CallArguments, logprobs: list[TokenLogprob]) -> Struct:
        index = self._reading.num_items - 1
        item_id = self._reading.item_id(index)
        match part:
            case Reasoning(text):
                return ReasoningTextDelta(self._number(), item_id, index, 0, text)
            case Content(text):
                return OutputTextDelta(self._number(), item_id, index, 0, text, logprobs)
            case CallArguments(_, text):
                return ArgumentsDelta(self._number(), item_id, index, text)

    def _close_item(self, index: int, status: str) -> list[Struct]:
        if index < 0:
            return []
        run, item_id = self._reading.run(index), self._reading.item_id(index)
        events: list[Struct] = []
        if run.call is not None:
            events.append(ArgumentsDone(self._number(), item_id, index, run.call.name, run.text))
        elif run.kind is Reasoning:
            events.append(ReasoningTextDone(self._number(), item_id, index, 0, run.text))
            events.append(ContentPartDone(self._number(), item_id, index, 0, ReasoningText(run.text)))
        else:
            part = self._reading.text_part(index)
            events.append(OutputTextDone(self._number(), item_id, index, 0, part.text, part.logprobs))
            events.append(ContentPartDone(self._number(), item_id, index, 0, part))
        events.append(OutputItemDone(self._number(), index, self._reading.item(index, status)))
        return events

    def _end(self, finish: Finish) -> list[Struct]:
        response = self._reading.response(finish)
        events = self._close_item(self._reading.num_items - 1, response.status)
        kind: Any = ResponseIncomplete if response.incomplete_details else ResponseCompleted
        return [*events, kind(self._number(), response)]


def _around_text(empty: OutputTextDelta) -> tuple[bytes, bytes, bytes]:
    """An event's bytes before its number, between that and its text, and behind: plain events differ in these two."""
    head, tail = cut_at_text(named_event(empty), b"delta")
    before, mark, middle = head.partition(b'"sequence_number":0')
    return before + mark[:-1], middle, tail


def _usage(finish: Finish, num_reasoning: int | None) -> ResponsesUsage:
    return ResponsesUsage(
        finish.num_prompt,
        InputTokensDetails(finish.num_cached),
        finish.num_generated,
        OutputReasoningDetails(num_reasoning or 0),
        finish.num_prompt + finish.num_generated,
    )


def _fault_code(error: TgiError) -> str:
    """OpenAI's few words."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
