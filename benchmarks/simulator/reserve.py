"""TGI 3's policy, as the baseline: memory reserved up front, prefixes shared once their first user has ended.

With prefill chunking and prefix caching on. What it does: requests start in order of arrival; each is given blocks for
its prompt and min(asked, 1,024) new tokens when it starts, and where these are not there it and all behind it wait;
newcomers join the running batch in one step with it, then one step follows without newcomers; a prompt is read in
chunks of what `max_batch_prefill_tokens` leaves, older ones first; an answer longer than 1,024 tokens goes back to the
end of the queue with what it has as its prompt; only prompts enter the prefix cache, when their request ends.

Where a choice was open it was made in its favour: its RPCs and its router cost no time, it never evicts for an
allocation that then fails, a continued answer asks only for what it still lacks, and its blocks are as small as its
attention back-end allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulator.machine import Machine, Work
from benchmarks.simulator.replay import Answer, Clock, Counts, Usage
from tgi.router.memory.allocator import Allocation
from tgi.router.memory.packed import ID_BYTES
from tgi.router.memory.radix import RadixAllocator

SEGMENT = 1_024  # most new tokens that a request is scheduled for at a time


@dataclass(slots=True, eq=False)
class Segment:
    """A request as TGI's queue knows it: an answer, or the next 1,024 tokens of a long one."""

    answer: Answer
    prompt: bytes
    num_prompt: int
    max_new: int
    allocation: Allocation | None = None
    computed: int = 0
    generated: int = 0
    chunk: int = 0  # tokens that the next step computes

    @property
    def room(self) -> int:
        """Tokens that it was allocated; the last token generated is never written."""
        return self.num_prompt + self.max_new - 1


class ReserveUpFront:
    """See System."""

    def __init__(self, machine: Machine, clock: Clock, lengths_known: bool) -> None:
        self.counts = Counts()
        self.allocator = RadixAllocator(machine.num_blocks(machine.tgi_block_size), machine.tgi_block_size)
        self.queue: deque[Segment] = deque()
        self.batch: list[Segment] = []  # by admission
        self._clock = clock
        self._lengths_known = lengths_known
        self._machine = machine
        self._decodes_next = False

    def submit(self, answer: Answer) -> None:
        self.queue.append(self._segment(answer))

    def begin(self) -> Work | None:
        if self._decodes_next:
            self._decodes_next = False
        else:
            was_running = bool(self.batch)
            self._decodes_next = self._admit() and was_running
        if not self.batch:
            if self.queue:
                raise RuntimeError(f"{len(self.queue)} requests wait for an empty server")
            return None
        reading = [segment for segment in self.batch if segment.computed < segment.num_prompt]
        context = sum(segment.computed + segment.chunk for segment in self.batch)
        return Work(len(self.batch) - len(reading), context, sum(segment.chunk for segment in reading))

    def finish(self) -> Sequence[Answer]:
        ended: list[Answer] = []
        for segment in self.batch:
            self._advance(segment)
        batch, self.batch = self.batch, []
        for segment in batch:
            if segment.answer.num_tokens == segment.answer.turn.num_answer:
                self._free(segment)
                ended.append(segment.answer)
            elif segment.generated == segment.max_new:
                self._free(segment)
                self.queue.append(self._segment(segment.answer))
            else:
                self.batch.append(segment)
        self._plan_chunks()
        return ended

    def usage(self) -> Usage:
        allocator = self.allocator
        held = allocator.num_blocks - 1 - allocator.num_available
        size = allocator.block_size
        empty = sum(-(-segment.room // size) * size - segment.computed for segment in self.batch)
        return Usage(len(self.batch), held * size, empty)

    def check(self) -> None:
        self.allocator.check([segment.allocation for segment in self.batch if segment.allocation is not None])

    def _segment(self, answer: Answer) -> Segment:
        turn, done = answer.turn, answer.num_tokens
        prompt = turn.prompt + turn.answer[: done * ID_BYTES]
        num_prompt = turn.num_prompt + done
        asked = turn.num_answer - done if self._lengths_known else self._machine.max_total_tokens - num_prompt
        return Segment(answer, prompt, num_prompt, min(asked, SEGMENT))

    def _admit(self) -> bool:
        """Take from the queue's front what memory and this step's tokens allow. -> was there any?"""
        size = self.allocator.block_size
        budget = self._machine.max_batch_prefill_tokens - sum(segment.chunk for segment in self.batch)
        left = -(-budget // size) * size
        admitted = 0
        while self.queue and left > 0:
            segment = self.queue[0]
            segment.allocation = self.allocator.allocate(segment.prompt, segment.room)
            if segment.allocation is None:
                break
            self.queue.popleft()
            self._start(segment, segment.allocation.cached_len)
            segment.chunk = min(segment.num_prompt - segment.computed, left)
            left -= segment.chunk
            admitted += 1
        return admitted > 0

    def _start(self, segment: Segment, cached: int) -> None:
        answer = segment.answer
        segment.computed = cached
        answer.computed = max(answer.computed, cached)
        self.batch.append(segment)
        if not answer.num_tokens:
            answer.admitted_s = self._clock.now
            self.counts.prompt_tokens += segment.num_prompt
            self.counts.cached_tokens += cached

    def _advance(self, segment: Segment) -> None:
        begin, end = segment.computed, segment.computed + segment.chunk
        prefill = max(0, min(end, segment.num_prompt) - begin)
        self.counts.add_computed(segment.answer, begin, end, prefill)
        segment.computed = end
        if end >= segment.num_prompt:
            segment.generated += 1
            self.counts.add_token(segment.answer, self._clock.now)

    def _plan_chunks(self) -> None:
        """What the next step computes of everyone here: one token of each, and of prompts what the budget leaves."""
        budget = self._machine.max_batch_prefill_tokens - (len(self.batch) - 1)
        for segment in self.batch:
            unread = segment.num_prompt - segment.computed
            segment.chunk = max(1, min(unread, budget))
            if unread > 0:
                budget -= segment.chunk

    def _free(self, segment: Segment) -> None:
        allocation = segment.allocation
        assert allocation is not None
        size = self.allocator.block_size
        room = allocation.num_blocks * size
        self.counts.reserved_tokens += room - allocation.cached_len
        self.counts.unused_tokens += room - segment.computed
        self.allocator.free(allocation, segment.prompt, segment.num_prompt)
