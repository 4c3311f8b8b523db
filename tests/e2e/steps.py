"""What a shard computed while something happened: its Steps, as the router handled them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from tests.e2e.servers import LocalRouter
from tgi.shard_client.messages import Step


@contextlib.contextmanager
def recorded_steps(router: LocalRouter) -> Iterator[list[Step]]:
    """Every Step that the router handles in the block, in order."""
    core, steps = router.core, []
    handle = core.step_work

    def record(step: Step) -> Iterator[None]:
        steps.append(step)
        return handle(step)

    core.step_work = record
    try:
        yield steps
    finally:
        core.step_work = handle


def prompt_tokens_computed(steps: Iterable[Step]) -> int:
    return sum(step.timings.prefill_tokens for step in steps)


def tokens_by_row(step: Step) -> dict[int, int]:
    """Tokens that each row got, by handle."""
    return dict(zip(step.handles, step.num_tokens or bytes([1]) * len(step.handles), strict=True))
