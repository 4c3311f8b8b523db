"""What a text completion looks like: one object for all choices, or the chunks of a stream.

Knows neither requests nor how an answer came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tgi.errors import TgiError
from tgi.router.api.answer import mean_logprob
from tgi.router.api.logprobs import Columns, TokenBytes
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
from tgi.router.infer import Collector
from tgi.router.schema.chat import Usage
from tgi.router.schema.completions import Completion, CompletionChoice, CompletionLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt stands before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """What a request wants to see of its answers."""

    head: Head
    vocabulary: TokenBytes
    num_alternatives: int | None  # log probabilities with that many alternatives; None: no log probabilities
    keep_special: bool  # special tokens are text
    is_scoring: bool  # the prompt alone: the one token that was made is dropped


class _Writer:
    """One choice, from its first token to its last: text and columns that belong together."""

    def __init__(self, look: Look, echo: Echo | None) -> None:
        self._look = look
        self._pending = "" if echo is None else echo.text  # of the prompt, not given out yet
        self._columns = None if look.num_alternatives is None else Columns(look.vocabulary, look.num_alternatives)

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        if self._columns is not None:
            self._columns.add_prompt(tokens, self._pending)

    def text(self, event: TokenEvent) -> str:
        """What the token adds, behind the echoed prompt if that is still to come."""
        before, self._pending = self._pending, ""
        if self._look.is_scoring:
            return before
        shown = visible_text(event, self._look.keep_special)
        if self._columns is not None:
            self._columns.add(event, shown)
        return before + shown

    def logprobs(self) -> CompletionLogprobs | None:
        """Of the tokens since the last call."""
        return None if self._columns is None else self._columns.take()

    def reason(self, finish: Finish) -> str:
        return "length" if self._look.is_scoring else FINISH_REASONS[finish.reason]


def completion(
    look: Look, tally: Tally, echoes: Sequence[Echo | None], groups: Sequence[Sequence[Collector]], n: int
) -> Completion:
    """The object of a request whose answers are complete: of each prompt's group the `n` best, prompt by prompt."""
    choices: list[CompletionChoice] = []
    for number, (echo, group) in enumerate(zip(echoes, groups, strict=True)):
        for collector in group:
            tally.add(collector.finish, number)
        for collector in best(group, n):
            # The prompt is scored once for all its answers.
            choices.append(_choice(look, len(choices), echo, group[0].prompt_tokens, collector))
    return Completion(**look.head.fields(), choices=choices, usage=tally.usage())


def best(group: Sequence[Collector], n: int) -> Sequence[Collector]:
    """The likeliest by the mean log probability of their tokens, as TGI chooses; where all are wanted, as they are."""
    return group if len(group) == n else sorted(group, key=mean_logprob, reverse=True)[:n]


class CompletionFrames:
    """The chunks of one choice of a stream; behind the last choice's end, the usage and `[DONE]`."""

    def __init__(
        self,
        look: Look,
        tally: Tally,
        usage: StreamUsage,
        num_prompt: int,
        prompt: int = 0,
        index: int = 0,
        echo: Echo | None = None,
    ) -> None:
        """`num_prompt`: tokens of the prompt with the number `prompt`. `tally` is one for all choices."""
        self._look = look
        self._tally = tally
        self._usage = usage
        self._num_prompt = num_prompt
        self._prompt = prompt
        self._index = index
        self._writer = _Writer(look, echo)
        self._num_tokens = 0
        self._plain: tuple[bytes, bytes] | None = None
        if look.num_alternatives is None and not usage.in_chunks:
            self._plain = cut_at_text(event_of(self._chunk([self._choice("")])), b"text")

    def prompt(self, tokens: Sequence[PromptToken]) -> None:
        self._writer.prompt(tokens)

    def token(self, event: TokenEvent) -> bytes:
        text, finish = self._writer.text(event), event.finish
        if self._plain is not None and finish is None:
            head, tail = self._plain
            return b"%b%b%b" % (head, _encode(text), tail)
        self._num_tokens += 0 if self._look.is_scoring else 1
        if finish is not None:
            self._tally.add(finish, self._prompt)
        usage = usage_so_far(self._num_prompt, self._num_tokens) if self._usage.in_chunks else None
        return event_of(self._chunk([self._choice(text, finish)], usage))

    def failure(self, error: TgiError) -> bytes:
        return failure(error)

    def close(self) -> bytes:
        if not self._usage.at_end:
            return DONE
        return event_of(self._chunk([], self._tally.usage())) + DONE

    def _choice(self, text: str, finish: Finish | None = None) -> CompletionChoice:
        logprobs = self._writer.logprobs()
        if finish is None:
            return CompletionChoice(index=self._index, text=text, logprobs=logprobs, finish_reason=None)
        return _last_choice(self._writer, self._index, text, logprobs, finish)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(**self._look.head.fields(), choices=choices, usage=usage)


def _choice(
    look: Look, index: int, echo: Echo | None, prompt_tokens: Sequence[PromptToken], collector: Collector
) -> CompletionChoice:
    writer = _Writer(look, echo)
    writer.prompt(prompt_tokens)
    text = "".join([writer.text(event) for event in collector.events])
    return _last_choice(writer, index, text, writer.logprobs(), collector.finish)


def _last_choice(
    writer: _Writer, index: int, text: str, logprobs: CompletionLogprobs | None, finish: Finish
) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason=writer.reason(finish),
        stop_reason=stop_reason_of(finish),
        seed=seed_of(finish),
    )
