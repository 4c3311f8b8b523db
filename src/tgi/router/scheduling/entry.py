"""A request in flight: what was asked, where its events go, the ids so far, and, while it runs, its row and blocks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from tgi.errors import GenerationFailed
from tgi.router.backend import PromptToken, Sink, Times
from tgi.router.memory.allocator import Allocation
from tgi.router.memory.packed import ID_BYTES
from tgi.router.scheduling.budget import SHARING_WORTH
from tgi.router.scheduling.fairness import Account
from tgi.router.scheduling.prompt_tokens import PromptTokens, Tops
from tgi.router.validation.request import Siblings, ValidRequest
from tgi.shard_client.messages import Admit, PromptLogprobs, Stopping


class Piece(Protocol):
    """What one token made visible. `stop`: the stop string that it completed."""

    @property
    def text(self) -> str: ...
    @property
    def special(self) -> bool: ...
    @property
    def stop(self) -> str | None: ...


class AnswerText(Protocol):
    """Ids in, text out: the part of tgi.text.stream.TextStream that is used here."""

    @property
    def text(self) -> str: ...
    def push(self, token_id: int) -> Piece: ...
    def finish(self) -> str: ...


class Vocabulary(Protocol):
    """The part of tgi.text.tokenizer.Tokenizer that is used here."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    def token_text(self, token_id: int) -> str: ...
    def is_special(self, token_id: int) -> bool: ...


class PrefixWait(NamedTuple):
    """An entry stays queued until the row of `leader` has published `length` tokens."""

    leader: Entry
    length: int


class State(Enum):
    QUEUED = "queued"
    LIVE = "live"
    ENDED = "ended"


PREFIX_HEAD = SHARING_WORTH * ID_BYTES
NEVER = 1 << 62  # tokens; no row gets there


class Entry:
    """One request from submission to its end. Also its Ticket.

    `handle`, `allocation`, `room`, `grow_at`, `computed_len` and `decoding` belong to the present row and change with
    each admission; the rest belongs to the request and survives preemption and a lost shard, so nothing is sent twice.
    """

    __slots__ = (
        "_cancel",
        "_prompt_logprobs",
        "_prompt_logprobs_missing",
        "_prompt_tops",
        "account",
        "admitted_at",
        "allocation",
        "barren_losses",
        "cached_len",
        "computed_len",
        "decoding",
        "first_token_at",
        "generated",
        "grow_at",
        "handle",
        "lent_priority",
        "limit",
        "namespace",
        "num_prompt",
        "passed_over",
        "prefix_key",
        "priority",
        "queued_at",
        "request",
        "returning",
        "room",
        "sequence",
        "sink",
        "state",
        "text",
        "tokens_at",
        "waits_for",
    )

    def __init__(
        self,
        request: ValidRequest,
        sink: Sink,
        text: AnswerText,
        sequence: int,
        queued_at: float,
        cancel: Callable[[Entry], None],
    ) -> None:
        self.request = request
        self.sink = sink
        self.text = text
        self.sequence = sequence  # order of arrival
        self.queued_at = queued_at
        self.state = State.QUEUED
        self.num_prompt = request.num_prompt_tokens
        self.limit = self.num_prompt + request.stopping.max_new_tokens
        self.namespace = cache_namespace(request)
        self.generated = array("I")
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.tokens_at: float | None = None  # when the last Step with tokens of it came
        self.cached_len: int | None = None  # tokens, at the first admission
        self.returning = False  # back in the queue after it ran
        self.passed_over = 0  # how many younger ones went first since it did not fit
        self.prefix_key = (self.namespace, request.prompt_ids[:PREFIX_HEAD])  # what sharers have in common at least
        self.waits_for: PrefixWait | None = None
        self.account = Account()  # the queue puts its client's in place
        self.priority = request.priority  # or what ageing had brought it to when it started
        self.lent_priority = request.priority  # of the most urgent request that waits for this one's prefix
        self.barren_losses = 0  # streams lost under it since its last token
        self.handle = 0
        self.allocation: Allocation | None = None
        self.room = 0  # tokens that its blocks can hold
        self.grow_at = NEVER  # needs blocks when it has more tokens than this
        self.computed_len = 0  # during prefill; afterwards all tokens but the last
        self.decoding = False  # this row has yielded a token
        self._cancel = cancel
        self._prompt_logprobs: array[float] | None = None
        self._prompt_logprobs_missing = self.num_prompt if request.prompt_logprobs else 0
        self._prompt_tops: Tops | None = None

    @property
    def suspect(self) -> Siblings | Entry:
        """Who fails for it: siblings are one request."""
        return self.request.siblings or self

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.generated)

    @property
    def ids(self) -> bytes:
        """Prompt and generated, packed."""
        return self.request.prompt_ids + self.generated.tobytes() if self.generated else self.request.prompt_ids

    @property
    def num_computed(self) -> int:
        """Positions of its row whose KV is in the cache for certain."""
        return self.num_tokens - 1 if self.decoding else self.computed_len

    @property
    def reads_cache(self) -> bool:
        """A cached position has no logits, so prompt logprobs need all of them computed."""
        return self.request.use_cache and not self._prompt_logprobs_missing

    @property
    def seniority(self) -> tuple[int, int]:
        """Smaller goes first: priority (own, aged or lent), then arrival."""
        return (-max(self.priority, self.lent_priority), self.sequence)

    def cancel(self) -> None:
        self._cancel(self)

    def admit_message(self, eos_ids: tuple[int, ...]) -> Admit:
        """Everything the shard needs to start or to go on. The entry has its handle and blocks."""
        request, stopping, allocation = self.request, self.request.stopping, self.allocation
        assert allocation is not None
        return Admit(
            handle=self.handle,
            prompt_ids=request.prompt_ids,
            generated_ids=self.generated.tobytes(),
            cached_len=allocation.cached_len,
            blocks=allocation.blocks,
            sampling=request.sampling,
            stopping=Stopping(
                max_new_tokens=stopping.max_new_tokens,
                min_new_tokens=stopping.min_new_tokens,
                eos_ids=eos_ids,
                stop_ids=stopping.stop_ids,
                ignore_eos=stopping.ignore_eos,
            ),
            priority=self.priority,
            top_n=request.top_n,
            prompt_logprobs=bool(self._prompt_logprobs_missing),
            prompt_top_n=request.prompt_top_n if self._prompt_logprobs_missing else 0,
            adapter_id=request.adapter_id,
            grammar=request.grammar,
            traceparent=request.traceparent,
        )

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Parts come in order; those of a row that gave way half-way come again, from the first."""
        if not self._prompt_logprobs_missing:
            return
        if self._prompt_logprobs is None:
            self._prompt_logprobs = array("f", [math.nan]) * self.num_prompt
        end = part.first_position + len(part.logprobs)
        self._prompt_logprobs[part.first_position : end] = part.logprobs
        self._prompt_logprobs_missing = max(0, self.num_prompt - end)
        if part.top_ids:
            self._add_prompt_tops(part)

    def _add_prompt_tops(self, part: PromptLogprobs) -> None:
        top_n = len(part.top_ids) // len(part.logprobs)
        if self._prompt_tops is None:
            size = top_n * self.num_prompt
            self._prompt_tops = Tops(array("I", [0]) * size, array("f", [math.nan]) * size)
        ids, logprobs = self._prompt_tops
        where = slice(part.first_position * top_n, part.first_position * top_n + len(part.top_ids))
        ids[where], logprobs[where] = part.top_ids, part.top_logprobs

    def take_prompt_tokens(self, vocabulary: Vocabulary) -> Sequence[PromptToken]:
        """The prompt with its logprobs, once; [] when they were taken. Raises GenerationFailed when some never came."""
        if self._prompt_logprobs_missing:
            raise GenerationFailed("the model server did not send the logprobs of the prompt")
        logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        tops, self._prompt_tops = self._prompt_tops, None
        return [] if logprobs is None else PromptTokens(self.request.prompt_ids, logprobs, tops, vocabulary)

    def times(self, finished: float) -> Times:
        return Times(
            received=self.request.received_at or self.queued_at,
            queued=self.queued_at,
            admitted=finished if self.admitted_at is None else self.admitted_at,
            first_token=finished if self.first_token_at is None else self.first_token_at,
            finished=finished,
        )


def cache_namespace(request: ValidRequest) -> bytes:
    """Whose prefixes a request may share: those of the same adapter and the same salt."""
    if not request.adapter_id and not request.cache_salt:
        return b""
    return repr((request.adapter_id, request.cache_salt)).encode()
