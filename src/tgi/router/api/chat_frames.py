"""What a chat's answer looks like: one object, or the chunks of a stream. Both are made of the same parts.

Knows neither requests nor how an answer came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, structs

from tgi.enums import FinishReason
from tgi.errors import TgiError
from tgi.router.api.logprobs import TokenBytes, chat_logprob
from tgi.router.api.openai_answer import (
    DONE,
    FINISH_REASONS,
    Head,
    StreamUsage,
    Tally,
    cut_at_text,
    event_of,
    failure,
    seed_of,
    stop_reason_of,
    usage_so_far,
    visible_text,
)
from tgi.router.api.openai_answer import encode as _encode
from tgi.router.backend import Finish, PromptToken, TokenEvent
from tgi.router.chat.answer import AnswerParser
from tgi.router.chat.json_scan import JsonScanner
from tgi.router.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from tgi.router.infer import Collector
from tgi.router.schema.chat import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionDelta,
    Logprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Look:
    """What a request wants to see of its answers."""

    head: Head
    vocabulary: TokenBytes
    num_alternatives: int | None  # log probabilities with that many alternatives; None: no log probabilities
    keep_special: bool  # special tokens are text

    def logprobs(self, events: Iterable[TokenEvent]) -> Logprobs | None:
        if self.num_alternatives is None:
            return None
        return Logprobs([chat_logprob(self.vocabulary, event, self.num_alternatives) for event in events])


class AnswerReader:
    """The tokens of one answer -> its parts. Without a parser all its text is content."""

    __slots__ = ("_arguments", "_keep_special", "_parser", "_thinks", "has_calls", "num_reasoning")

    def __init__(self, parser: AnswerParser | None, keep_special: bool) -> None:
        self._parser = parser
        self._keep_special = keep_special
        self._thinks = False
        self._arguments = JsonScanner()  # of the last call
        self.has_calls = False
        self.num_reasoning: int | None = None if parser is None else 0  # tokens

    def read(self, event: TokenEvent) -> list[Part]:
        parser = self._parser
        if parser is None:
            return [Content(visible_text(event, self._keep_special))]
        if event.special and self._keep_special:
            parts = parser.push(visible_text(event, True), False)
        else:
            parts = parser.push(event.text, event.special)
        if event.finish is not None:
            parts = [*parts, *parser.finish()]
        # A token that shows nothing belongs to what came before it: it is a mark, or a part of one.
        has_thought = self._thinks and not parts
        for part in parts:
            self._thinks = part.__class__ is Reasoning
            has_thought = has_thought or self._thinks
            if isinstance(part, CallBegin):
                self.has_calls = True
                self._arguments = JsonScanner()
            elif isinstance(part, CallArguments) and not self._is_whole:
                self._arguments.feed(part.text)
        if has_thought:
            self.num_reasoning = (self.num_reasoning or 0) + 1
        return parts

    def is_calling(self, finish: Finish) -> bool:
        """Are there calls to be made? Not where the length or a stop string has cut one off."""
        if finish.reason is FinishReason.LENGTH or not self.has_calls:
            return False
        return self._is_whole or not isinstance(finish.stop, str)

    def reason(self, finish: Finish) -> str:
        return "tool_calls" if self.is_calling(finish) else FINISH_REASONS[finish.reason]

    @property
    def _is_whole(self) -> bool:
        """The last call, as far as its arguments tell."""
        return self._arguments.complete or self._arguments.broken


def chat_completion(
    look: Look, tally: Tally, collectors: Sequence[Collector], parsers: Sequence[AnswerParser | None]
) -> ChatCompletion:
    """The object of a request whose answers are complete."""
    choices: list[Choice] = []
    for index, (collector, parser) in enumerate(zip(collectors, parsers, strict=True)):
        finish = collector.finish
        reader = AnswerReader(parser, look.keep_special)
        message = _message([part for event in collector.events for part in reader.read(event)])
        tally.add(finish, num_reasoning=reader.num_reasoning)
        choices.append(
            Choice(
                index=index,
                message=message,
                logprobs=look.logprobs(collector.events),
                finish_reason=reader.reason(finish),
                stop_reason=stop_reason_of(finish),
                seed=seed_of(finish),
            )
        )
    return ChatCompletion(**look.head.fields(), choices=choices, usage=tally.usage())


class ChatFrames:
    """The chunks of one choice of a stream; behind the last choice's end, the usage and `[DONE]`."""

    def __init__(
        self,
        look: Look,
        tally: Tally,
        usage: StreamUsage,
        num_prompt: int,
        index: int = 0,
        parser: AnswerParser | None = None,
    ) -> None:
        """`num_prompt`: tokens. `tally` is one for all choices."""
        self._look = look
        self._tally = tally
        self._usage = usage
        self._num_prompt = num_prompt
        self._index = index
        self._parses = parser is not None
        self._reader = AnswerReader(parser, look.keep_special)
        self._num_tokens = 0
        self._has_begun = False
        self._plain: tuple[bytes, bytes] | None = None  # around the text of a chunk that is neither first nor last
        if look.num_alternatives is None and not usage.in_chunks:
            self._plain = cut_at_text(event_of(self._chunk([self._choice(Delta(content=""))])), b"content")

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        """Chats tell nothing of their prompt."""

    def token(self, event: TokenEvent) -> bytes:
        finish = event.finish
        plain = self._plain if self._has_begun and finish is None else None
        if plain is not None and not self._parses:
            text = visible_text(event, self._look.keep_special) if event.special else event.text
            return b"%b%b%b" % (plain[0], _encode(text), plain[1])
        parts = self._reader.read(event)
        if plain is not None and len(parts) == 1 and isinstance(parts[0], Content):
            return b"%b%b%b" % (plain[0], _encode(parts[0].text), plain[1])
        self._num_tokens += 1
        deltas = [_delta(part) for part in parts]
        if finish is not None:
            self._tally.add(finish, num_reasoning=self._reader.num_reasoning)
            if self._parses:
                deltas.append(Delta() if self._reader.has_calls else Delta(content=""))
        logprobs = self._look.logprobs([event])
        if logprobs is not None and not deltas:
            deltas.append(Delta(content=""))
        choices = [self._choice(delta) for delta in deltas]
        if choices:
            choices[0].logprobs = logprobs
            self._begin(choices[0])
        if finish is not None:
            last = choices[-1]
            last.finish_reason = self._reader.reason(finish)
            last.stop_reason = stop_reason_of(finish)
            last.seed = seed_of(finish)
        usage = usage_so_far(self._num_prompt, self._num_tokens) if self._usage.in_chunks else None
        return b"".join([event_of(self._chunk([choice], usage)) for choice in choices])

    def failure(self, error: TgiError) -> bytes:
        return failure(error)

    def close(self) -> bytes:
        if not self._usage.at_end:
            return DONE
        return event_of(self._chunk([], self._tally.usage())) + DONE

    def _begin(self, first: ChunkChoice) -> None:
        if not self._has_begun:
            self._has_begun = True
            first.delta = structs.replace(first.delta, role="assistant")

    def _choice(self, delta: Delta) -> ChunkChoice:
        return ChunkChoice(index=self._index, delta=delta)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._look.head.fields(), choices=choices, usage=usage)


def _message(parts: Sequence[Part]) -> AssistantMessage:
    content = "".join([part.text for part in parts if isinstance(part, Content)])
    reasoning = "".join([part.text for part in parts if isinstance(part, Reasoning)])
    arguments: dict[int, list[str]] = {part.index: [] for part in parts if isinstance(part, CallBegin)}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    calls = [
        ToolCall(part.id, "function", FunctionCall(part.name, "".join(arguments[part.index])))
        for part in parts
        if isinstance(part, CallBegin)
    ]
    return AssistantMessage(
        content=None if calls and not content else content,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _delta(part: Part) -> Delta:
    match part:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text)
        case CallBegin(index, call_id, name):
            return Delta(
                tool_calls=[ToolCallDelta(index=index, id=call_id, type="function", function=FunctionDelta(name))]
            )
        case CallArguments(index, text):
            return Delta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])
