"""Steps that wait to be sent to the router: merged, so that a slow router gets fewer, fuller messages. Knows no
gRPC."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import replace

from tgi.enums import EndReason
from tgi.shard_client.messages import Step, Timings

MAX_TOKENS_PER_ROW = 255  # `Step.num_tokens` is a byte


class Outbox:
    """One stream's way out. `put` never blocks: what can pile up is bounded by the window."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._steps: list[Step] = []
        self.closed_because: str | None = None

    def put(self, step: Step) -> None:
        with self._condition:
            self._steps.append(step)
            self._condition.notify()

    def close(self, reason: str) -> None:
        """No more steps. What waits is still taken."""
        with self._condition:
            if self.closed_because is None:
                self.closed_because = reason
            self._condition.notify_all()

    def take(self) -> Step | None:
        """Wait for steps and return them as one; None when the stream has ended."""
        with self._condition:
            while not self._steps:
                if self.closed_because is not None:
                    return None
                self._condition.wait()
            count = 1 if self._steps[0].opening is not None else min(len(self._steps), MAX_TOKENS_PER_ROW)
            steps, self._steps = self._steps[:count], self._steps[count:]
        return merge(steps)


def merge(steps: Sequence[Step]) -> Step:
    """Several steps as one message, in order. Rows stand in the order in which they first appear."""
    if len(steps) == 1:
        return steps[0]
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    ends: dict[int, int] = {}
    progress: dict[int, int] = {}
    last = steps[-1]
    merged = replace(
        last, handles=array("Q"), token_ids=array("I"), logprobs=array("f"), ends=b"", errors=[], top_tokens=[]
    )
    merged.prompt_logprobs, merged.progress_handles, merged.computed_len = [], array("Q"), array("I")
    for step in steps:
        position = 0
        for index, handle in enumerate(step.handles):
            count = step.num_tokens[index] if step.num_tokens else 1
            before = ids.setdefault(handle, [])
            for top in step.top_tokens:
                if top.handle == handle:
                    merged.top_tokens.append(replace(top, index=top.index + len(before)))
            before.extend(step.token_ids[position : position + count])
            logprobs.setdefault(handle, []).extend(step.logprobs[position : position + count])
            ends[handle] = step.ends[index] if step.ends else EndReason.RUNNING
            position += count
        progress.update(zip(step.progress_handles, step.computed_len, strict=True))
        merged.prompt_logprobs.extend(step.prompt_logprobs)
        merged.errors.extend(step.errors)
    merged.handles.extend(ids)
    merged.num_tokens = bytes(len(row) for row in ids.values())
    for row in ids.values():
        merged.token_ids.extend(row)
    for row in logprobs.values():
        merged.logprobs.extend(row)
    if any(ends.values()):
        merged.ends = bytes(ends.values())
    # A row that has chosen its first id has nothing left to read.
    for handle, computed in progress.items():
        if handle not in ids:
            merged.progress_handles.append(handle)
            merged.computed_len.append(computed)
    merged.timings = _sum([step.timings for step in steps])
    return merged


def _sum(timings: Sequence[Timings]) -> Timings:
    return Timings(
        plan_ns=sum(entry.plan_ns for entry in timings),
        forward_ns=sum(entry.forward_ns for entry in timings),
        collect_ns=sum(entry.collect_ns for entry in timings),
        steps=sum(entry.steps for entry in timings),
        prefill_tokens=sum(entry.prefill_tokens for entry in timings),
        decode_tokens=sum(entry.decode_tokens for entry in timings),
    )
