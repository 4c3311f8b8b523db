"""A seed decides the tokens, whatever else the server does: in company, after giving way, plain or streamed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.servers import LocalRouter, local_server, until
from tests.e2e.workload import Request, random_text
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.row("E: Sampling and seeds")]

OTHERS = 32
MANY = 20
# In blocks of 64: 33 short rows of 2 fit, with a reserve of one for each; 33 long ones of 6 are far too many.
POOL = 120 * 64
SEED = 4711
MINE = Request(
    "generate", "hello world", False, {"max_new_tokens": 300, "temperature": 0.8, "seed": SEED, "ignore_eos": True}
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
    """`mine` starts when nearly all others run: on a slow machine the first may end before the last has begun."""
    async with Client(router.url) as client, asyncio.TaskGroup() as group:
        for request in others(longest):
            group.create_task(request.send(client))
        await until(lambda: len(router.core.rows) >= MANY, "many others run")
        task = group.create_task(mine.send(client))
        await until(lambda: len(router.core.rows) > MANY, "they run together")
    return task.result()


def assert_same(found: Answer, alone: Answer, what: str) -> None:
    assert found.told == alone.told
    print(f"{what}: 0 divergences excused in {len(alone.ids)} tokens")


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


@pytest.mark.row("A: best_of, best_of_sequences")
def test_each_of_several_answers_is_what_its_seed_gives_alone(router: LocalRouter) -> None:
    parameters = {"max_new_tokens": 60, "temperature": 0.8, "ignore_eos": True}
    text = "hello world " * 50  # more than a block, so that the second forks from the first
    core = router.core

    async def run() -> None:
        async with Client(router.url) as client:
            cached = core.stats.cached_tokens
            body = {"inputs": text, "parameters": {**parameters, "best_of": 2, "decoder_input_details": True}}
            answer = await client._post("/generate", body)
            assert core.stats.cached_tokens - cached >= core.allocator.block_size
            details = answer["details"]
            (other,) = details["best_of_sequences"]
            assert len(details["prefill"]) > core.allocator.block_size
            assert [token["logprob"] is None for token in details["prefill"][:2]] == [True, False]
            means = [sum(token["logprob"] for token in one["tokens"]) / 60 for one in (details, other)]
            assert means[0] >= means[1]
            for said, one in ((answer["generated_text"], details), (other["generated_text"], other)):
                alone = await client.generate(text, seed=one["seed"], **parameters)
                assert (alone.text, alone.ids) == (said, tuple(token["id"] for token in one["tokens"]))

    router.run(run())


@pytest.mark.row("G: 3 the same seed")
def test_among_many_others(router: LocalRouter, alone: Answer) -> None:
    before = router.core.stats.preemptions
    found = router.run(in_company(router, 100, MINE))
    assert router.core.stats.preemptions == before, "this test is about company alone"
    assert_same(found, alone, "in company")


def test_after_giving_way(router: LocalRouter, alone: Answer) -> None:
    """The lowest priority gives way first, unless it is the oldest: that is the second request here."""
    mine = Request("generate", MINE.text, True, {**MINE.parameters, "priority": -1})
    core = router.core

    async def run() -> tuple[Answer, int]:
        async with Client(router.url) as client, asyncio.TaskGroup() as group:
            oldest, *rest = others(360)
            group.create_task(oldest.send(client))
            await until(lambda: core.rows, "the oldest runs")
            task = group.create_task(mine.send(client))
            await until(lambda: len(core.rows) == 2, "both run")
            for request in rest:
                group.create_task(request.send(client))
            # It waits for as long as all the others need: that cannot be missed.
            entry = await until(
                lambda: next((e for e in core.queue if e.returning and e.request.sampling.seed == SEED), None),
                "it gives way",
            )
            num_generated = len(entry.generated)
        return task.result(), num_generated

    found, num_generated = router.run(run())
    assert 0 < num_generated < len(alone.ids)
    assert_same(found, alone, f"resumed after {num_generated} tokens")
