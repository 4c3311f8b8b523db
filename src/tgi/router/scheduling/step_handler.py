"""A Step -> tokens to sinks, computed prompt blocks to the tree, ends. Decides nothing about memory or admission.

Works in slices: after each few rows it hands control back, so that the driver can let others run. Looks every row up
by its handle when its turn comes, since rows may leave between two slices (rule 4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from tgi.enums import EndReason, FinishReason
from tgi.errors import GenerationFailed, InvalidRequest, TgiError
from tgi.router.backend import Finish, TokenEvent, TopToken
from tgi.router.memory.allocator import Allocator
from tgi.router.scheduling.entry import Entry, State, Vocabulary
from tgi.router.scheduling.live import LiveRows
from tgi.router.scheduling.prefix_wait import PrefixLeaders
from tgi.router.scheduling.stats import SchedulerStats
from tgi.shard_client.messages import RowError, Step, TopTokens
from tgi.text.stream import Piece

logger = logging.getLogger(__name__)

ROWS_PER_SLICE = 16
_RUNNING = int(EndReason.RUNNING)
_NO_TEXT = Piece("", False, None)
_REASONS = {
    int(EndReason.LENGTH): FinishReason.LENGTH,
    int(EndReason.EOS): FinishReason.EOS_TOKEN,
    int(EndReason.STOP_ID): FinishReason.STOP_SEQUENCE,
}


class StepHandler:
    """`leave(entry, tell_shard)` gives row and blocks back; `fail(entry, error, tell_shard)` also ends the answer.

    `clear(entry)` hears of the first token of each row.
    """

    def __init__(
        self,
        rows: LiveRows,
        vocabulary: Vocabulary,
        stats: SchedulerStats,
        clock: Callable[[], float],
        leave: Callable[[Entry, bool], None],
        fail: Callable[[Entry, TgiError, bool], None],
        clear: Callable[[Entry], None],
    ) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._stats = stats
        self._clock = clock
        self._leave = leave
        self._fail = fail
        self._clear = clear
        self._last_at = 0.0  # when the Step before came

    def work(self, step: Step, allocator: Allocator, leaders: PrefixLeaders, short: dict[int, Entry]) -> Iterator[None]:
        """Rows that need blocks afterwards are added to `short`, by handle. Yields between slices."""
        now, last_at = self._clock(), self._last_at
        num_gaps = 0  # rows that had tokens in the Step before, too: nearly all, and told as one
        yield from self._prefill(step, allocator, leaders)
        get = self._rows.get
        tops = {(top.handle, top.index): top for top in step.top_tokens}
        token_ids, logprobs, counts, ends = step.token_ids, step.logprobs, step.num_tokens, step.ends
        position = 0
        for index, handle in enumerate(step.handles):
            count = counts[index] if counts else 1
            entry = get(handle)
            if entry is not None:
                if count:
                    if entry.tokens_at == last_at:
                        num_gaps += 1
                    elif entry.tokens_at is not None:
                        self._stats.observe("tgi_request_inter_token_duration", now - entry.tokens_at, None)
                    entry.tokens_at = now
                end = ends[index] if ends else _RUNNING
                try:
                    if not entry.decoding and end != EndReason.NAN:
                        self._first_token(entry, allocator, leaders)
                    for offset in range(count):
                        self._token(
                            entry,
                            token_ids[position + offset],
                            logprobs[position + offset],
                            end if offset == count - 1 else _RUNNING,
                            tops.get((handle, offset)) if tops else None,
                        )
                        if entry.state is not State.LIVE:
                            break  # the rest of the row's tokens in this Step is nobody's
                    else:
                        if entry.num_prompt + len(entry.generated) > entry.grow_at:
                            short[handle] = entry
                except Exception as error:  # one request's fault, whatever it is, stays that request's
                    self._broken(entry, error)
            position += count
            if not (index + 1) % ROWS_PER_SLICE:
                yield
        if num_gaps:
            self._stats.observe("tgi_request_inter_token_duration", now - last_at, None, num_gaps)
        self._last_at = now
        for error in step.errors:
            entry = get(error.handle)
            if entry is not None:
                self._fail(entry, _fault(error), False)

    def _prefill(self, step: Step, allocator: Allocator, leaders: PrefixLeaders) -> Iterator[None]:
        get = self._rows.get
        for index, handle in enumerate(step.progress_handles):
            entry = get(handle)
            if entry is not None and not entry.decoding:
                entry.computed_len = max(entry.computed_len, step.computed_len[index])
                self._publish(entry, allocator)
                # A row that waits for its grammar has its last position still to compute: not worth waiting for.
                is_read = entry.computed_len >= entry.num_prompt - 1
                if is_read or (entry.allocation and entry.allocation.is_doubled):
                    leaders.remove(entry)
            if not (index + 1) % ROWS_PER_SLICE:
                yield
        for part in step.prompt_logprobs:
            entry = get(part.handle)
            if entry is not None:
                entry.add_prompt_logprobs(part)

    def _publish(self, entry: Entry, allocator: Allocator) -> None:
        if entry.request.use_cache:
            assert entry.allocation is not None
            allocator.publish(entry.allocation, entry.ids, entry.computed_len)

    def _first_token(self, entry: Entry, allocator: Allocator, leaders: PrefixLeaders) -> None:
        """Of this row: all ids it was given are computed."""
        entry.computed_len = entry.num_tokens
        self._publish(entry, allocator)
        leaders.remove(entry)
        entry.decoding = True
        self._clear(entry)
        if entry.first_token_at is None:
            entry.first_token_at = self._clock()
        if entry.request.prompt_logprobs:
            prompt = entry.take_prompt_tokens(self._vocabulary)
            if prompt:
                entry.sink.prompt(prompt)

    def _token(self, entry: Entry, token_id: int, logprob: float, end: int, top: TopTokens | None) -> None:
        if end == EndReason.NAN:
            self._fail(entry, GenerationFailed("the model's logits are not numbers for this request"), False)
            return
        entry.generated.append(token_id)
        entry.account.charge_token()
        entry.barren_losses = 0
        piece = _NO_TEXT
        if end != EndReason.STOP_ID or self._shows_stop_id(entry, token_id):
            piece = entry.text.push(token_id)
        event = TokenEvent(token_id, piece.text, logprob, piece.special)
        if top is not None:
            event.top_tokens = self._top_tokens(top)
        stop = piece.stop
        if end or stop is not None:
            self._finish(entry, event, end, stop)
        self._stats.generated_tokens += 1
        entry.sink.token(event)

    def _shows_stop_id(self, entry: Entry, token_id: int) -> bool:
        """As with stop strings. A special token is marked as such, and is no part of the answer anyway."""
        return entry.request.stopping.include_stop or self._vocabulary.is_special(token_id)

    def _finish(self, entry: Entry, event: TokenEvent, end: int, stop: str | None) -> None:
        """Complete the last event. Row and blocks go back before anyone hears of it."""
        reason = _REASONS[end] if end else FinishReason.STOP_SEQUENCE
        matched: str | int | None = stop
        if stop is None:
            rest = entry.text.finish()
            if rest and event.special:
                # What was held back for a stop string that never came must still go out: the last token carries it.
                event.text, event.special = rest, False
            else:
                event.text += rest
            if end == EndReason.STOP_ID:
                matched = event.token_id
        elif end == EndReason.LENGTH:
            reason = FinishReason.STOP_SEQUENCE
        self._leave(entry, not end)
        entry.state = State.ENDED
        sampling = entry.request.sampling
        event.finish = Finish(
            reason=reason,
            text=entry.text.text,
            num_generated=len(entry.generated),
            num_prompt=entry.num_prompt,
            num_cached=entry.cached_len or 0,
            seed=sampling.seed if sampling.do_sample else None,
            stop=matched,
            times=entry.times(self._clock()),
        )

    def _top_tokens(self, top: TopTokens) -> tuple[TopToken, ...]:
        text, is_special = self._vocabulary.token_text, self._vocabulary.is_special
        return tuple(
            TopToken(token_id, text(token_id), logprob, is_special(token_id))
            for token_id, logprob in zip(top.token_ids, top.logprobs)
        )

    def _broken(self, entry: Entry, error: Exception) -> None:
        logger.error("a token could not be handed on; its request fails", exc_info=error)
        if entry.state is State.LIVE:
            wrapped = error if isinstance(error, TgiError) else GenerationFailed(f"the answer broke: {error}")
            self._fail(entry, wrapped, True)


def _fault(error: RowError) -> TgiError:
    """What the client is told: whether it was its own fault, or the model's (out of memory included: it ran alone)."""
    message = error.message or error.code
    match error.code:
        case "invalid":
            return InvalidRequest(message)
        case "grammar":
            return InvalidRequest(message, "grammar")
        case _:
            return GenerationFailed(message)
