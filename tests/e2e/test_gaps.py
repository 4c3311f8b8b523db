"""How long running streams wait while a prompt is read: counted in steps, the time only told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.conftest import Measured
from tests.e2e.client import Client
from tests.e2e.servers import LocalRouter, local_server, until
from tests.e2e.steps import recorded_steps, tokens_by_row
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.failures]

STREAMS = 16
CONTEXT = 4_096  # tokens that a request may have
BUDGET = 256  # tokens of one step
ANSWER = 400
TEXT = "hello world " * CONTEXT


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRouter]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model"), max_position=CONTEXT, seed=3)
    with local_server(
        model, max_total_tokens=CONTEXT, max_input_tokens=CONTEXT - 1, max_batch_prefill_tokens=BUDGET
    ) as router:
        yield router


@pytest.mark.row("D: Chunked prefill")
def test_a_prompt_at_the_context_limit_costs_running_streams_one_step_per_token(
    router: LocalRouter, measured: Measured
) -> None:
    gaps: dict[str, float] = {"before": 0.0, "while it is read": 0.0}
    core = router.core
    phase = "before"

    async def stream(client: Client, number: int) -> None:
        parameters = {"max_new_tokens": ANSWER, "ignore_eos": True, "details": True}
        last = None
        async for _ in client.events("/generate_stream", {"inputs": f"hello {number}", "parameters": parameters}):
            now = time.perf_counter()
            if last is not None:
                gaps[phase] = max(gaps[phase], now - last)
            last = now

    async def run() -> None:
        nonlocal phase
        async with Client(router.url) as client, asyncio.TaskGroup() as group:
            streams = [group.create_task(stream(client, number)) for number in range(STREAMS)]
            await until(
                lambda: len(core.rows) == STREAMS and all(len(entry.generated) > 8 for entry in core.rows),
                "all streams run",
            )
            running = [entry.handle for entry in core.rows]
            phase = "while it is read"
            with recorded_steps(router) as steps:
                answer = await client.generate(TEXT, truncate=CONTEXT - 1, max_new_tokens=1)
            assert len(answer.ids) == 1
            assert not any(task.done() for task in streams), "they did not run for long enough"
            reading = [step for step in steps if step.timings.prefill_tokens]
            assert sum(step.timings.prefill_tokens for step in reading) == CONTEXT - 1
            assert sum(step.timings.steps for step in reading) >= (CONTEXT - 1) / BUDGET
            for step in reading:
                timings = step.timings
                assert timings.prefill_tokens + timings.decode_tokens <= BUDGET * timings.steps
                got = tokens_by_row(step)
                # A token in every step, so never two steps with prefill between two of its tokens.
                assert [got.get(handle) for handle in running] == [timings.steps] * STREAMS

    router.run(run())
    for when, gap_s in gaps.items():
        measured(f"largest gap of {STREAMS} streams, {when}", 1e3 * gap_s, "ms")
