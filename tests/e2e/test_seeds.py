"""A seed decides the tokens, whatever else the server does: in company, after giving way, plain or streamed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.servers import LocalRouter, local_server, until
from tests.e2e.workload import Comparison, Request, random_text
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.row("E: Sampling and seeds")]

OTHERS = 32
# In blocks of 64: 33 short rows of 2 fit with the reserve of one for each; 33 long ones of 6 are far too many.
POOL = 110 * 64
SEED = 4711
MINE = Request(
    "generate", "hello world", False, {"max_new_tokens": 100, "temperature": 0.8, "seed": SEED, "ignore_eos": True}
)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRouter]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model"), seed=7)
    with local_server(model, max_batch_total_tokens=POOL, max_total_tokens=512) as router:
        yield router


@pytest.fixture(scope="module")
def alone(router: LocalRouter) -> Answer:
    async def run() -> Answer:
        async with Client(router.url) as client:
            return await MINE.send(client)

    return router.run(run())


def others(longest: int) -> list[Request]:
    rng = random.Random(longest)
    return [
        Request(
            "generate",
            random_text(rng, 3),
            rng.random() < 0.5,
            {"max_new_tokens": longest - rng.randint(0, 9), "seed": index, "temperature": 0.8, "ignore_eos": True},
        )
        for index in range(OTHERS)
    ]


async def in_company(router: LocalRouter, longest: int, mine: Request) -> Answer:
    """`mine` starts when all others run."""
    async with Client(router.url) as client, asyncio.TaskGroup() as group:
        for request in others(longest):
            group.create_task(request.send(client))
        await until(lambda: len(router.core.rows) == OTHERS, "all others run")
        task = group.create_task(mine.send(client))
        await until(lambda: len(router.core.rows) == OTHERS + 1, "all run together")
    return task.result()


def assert_same(found: Answer, alone: Answer, what: str) -> None:
    comparison = Comparison()
    comparison.compare(found, alone, MINE)
    comparison.report(what)
    assert comparison.excused == 0


def test_again_and_streamed(router: LocalRouter, alone: Answer) -> None:
    async def run() -> None:
        async with Client(router.url) as client:
            assert_same(await MINE.send(client), alone, "again")
            assert_same(await MINE.send(client, stream=True), alone, "streamed")
            other = Request("generate", MINE.text, False, {**MINE.parameters, "seed": SEED + 1})
            assert (await other.send(client)).ids != alone.ids
            unseeded = Request("generate", MINE.text, False, {**MINE.parameters, "seed": None})
            first, second = await unseeded.send(client), await unseeded.send(client)
            assert first.seed != second.seed
            assert first.ids != second.ids

    router.run(run())


@pytest.mark.row("G: 3 the same seed")
def test_among_many_others(router: LocalRouter, alone: Answer) -> None:
    before = router.core.stats.preemptions
    found = router.run(in_company(router, 60, MINE))
    assert router.core.stats.preemptions == before, "this test is about company alone"
    assert_same(found, alone, "in company")


def test_after_giving_way(router: LocalRouter, alone: Answer) -> None:
    """The youngest of the lowest priority gives way first: that is this one."""
    mine = Request("generate", MINE.text, True, {**MINE.parameters, "priority": -1})

    async def run() -> tuple[Answer, int]:
        task = asyncio.create_task(in_company(router, 360, mine))
        queue = router.core.queue
        resumed = await until(
            lambda: next((e for e in queue if e.returning and e.request.sampling.seed == SEED), None),
            "the request gives way",
        )
        return await task, len(resumed.generated)

    before = router.core.stats.preemptions
    found, _ = router.run(run())
    assert router.core.stats.preemptions > before
    assert_same(found, alone, f"after {router.core.stats.preemptions - before} preemptions")
