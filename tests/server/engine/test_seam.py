"""The real scheduler against the real engine, over a device that checks every read of the KV cache."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.fakes.device import FakeDevice, expected_ids
from tests.fakes.masks import LateMasks, expected_under_grammar
from tests.fakes.scheduling import TOKENIZER, Link, MemorySink, make_request, open_text
from tests.fakes.scripted_shard import ids_of, pack
from tests.fakes.seam import Workload, drive
from tests.fakes.tokenizer import write_byte_tokenizer
from tgi.errors import GenerationFailed
from tgi.router.memory import radix
from tgi.router.scheduling.core import SchedulerConfig, SchedulerCore
from tgi.router.validation.request import ValidRequest
from tgi.server.batch.table import RequestTable
from tgi.server.engine.engine import Engine, Limits
from tgi.server.engine.plan import PrefillBudget
from tgi.server.grammar.mask import Masks
from tgi.server.grammar.vocabulary import Vocabulary, read_vocabulary
from tgi.shard_client.messages import Command, Step

VOCAB_SIZE = 120
ROWS = 6
# One that ends soon, one that may end anywhere, one that the answer's length cuts off.
PATTERNS = ("[a-f]{3,12}(,[a-f]{2,6}){1,3}", "[a-z ]{0,60}", "[n-z]{200}")
LAUNCHING = pytest.mark.parametrize(("lag", "depth"), [(0, 1), (1, 2), (2, 2)])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = write_byte_tokenizer(tmp_path_factory.mktemp("seam") / "bytes")
    return read_vocabulary(path, TOKENIZER.vocab_size, TOKENIZER.eos_ids)


@pytest.fixture(scope="module")
def masks(vocabulary: Vocabulary) -> LateMasks:
    """For all histories in turn: its threads never end."""
    return LateMasks(vocabulary)


class EngineUnderTest:
    """The loop of engine/loop.py without its thread, one turn at a time."""

    def __init__(self, load: Workload, lag: int, depth: int, rows: int = ROWS, masks: Masks | None = None) -> None:
        self.load = load
        self.num_rows = rows
        self.masks = masks
        self.device = FakeDevice(load.block_size, lag=lag, depth=depth, vocab_size=VOCAB_SIZE)
        self.epochs = itertools.count(1)
        self.max_ahead = 0
        self.seen = 0
        self.told = False
        self.renew_cache()

    def renew_cache(self) -> None:
        """As after a restart: another process, nothing in its cache."""
        self.device = FakeDevice(
            self.load.block_size, lag=self.device.lag, depth=self.device.depth, vocab_size=VOCAB_SIZE
        )
        budget = max(24, self.load.block_size)
        limits = Limits(
            self.load.window,
            PrefillBudget(budget, budget, True),
            self.load.num_blocks,
            kv_epoch=next(self.epochs),
            num_host_blocks=self.load.num_host_blocks,
        )
        self.engine = Engine(self.device, RequestTable(self.num_rows, self.load.block_size), limits, self.masks)

    def open(self, owner: str = "") -> Step:
        self.seen = 0
        self.told = False
        return self.engine.open(owner)

    def apply(self, command: Command) -> None:
        self.seen = command.seen
        self.told = self.told and not command
        self.engine.apply(command)

    def advance(self) -> Step | None:
        engine = self.engine
        while True:
            while engine.num_in_flight < engine.depth and engine.window_is_open and (plan := engine.plan()) is not None:
                engine.launch(plan)
                self.told = False
                self.max_ahead = max(self.max_ahead, plan.number - self.seen)
            if engine.num_in_flight:
                return engine.collect()
            if not (engine.num_held and engine.window_is_open):
                break  # else a mask that was late will be there, one of the next times
        if self.told or not engine.window_is_open:
            return None
        self.told = True
        return engine.idle_step()


def run(
    block_size: int,
    lag: int,
    depth: int,
    seed: int,
    window: int,
    operations: int,
    next_handle: int = 1,
    **fields: float,
) -> EngineUnderTest:
    load = Workload(
        num_blocks=max(7, 160 // block_size + 2),
        block_size=block_size,
        window=window,
        vocab_size=VOCAB_SIZE,
        longest_prompt=max(40, 2 * block_size),
        longest_answer=max(70, block_size // 2),
        operations=operations if block_size < 64 else operations // 2,
        next_handle=next_handle,
        **fields,  # pyright: ignore[reportArgumentType]
    )
    shard = EngineUnderTest(load, lag, depth)
    drive(
        shard,
        shard.renew_cache,
        lambda request: expected_ids(
            ids_of(request.prompt_ids), request.stopping.max_new_tokens, request.sampling.seed, VOCAB_SIZE
        ),
        load,
        seed,
    )
    assert shard.max_ahead <= window
    assert shard.engine.table.num_live == 0
    assert shard.engine.table.num_free == ROWS
    return shard


@pytest.mark.fault("TGI#3043")
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@LAUNCHING
def test_random_histories(block_size: int, lag: int, depth: int) -> None:
    for seed, window in enumerate((4, 9)):
        shard = run(block_size, lag, depth, seed, window, operations=500)
        assert shard.device.tokens_computed > 100


@LAUNCHING
def test_handles_run_out_on_the_way(lag: int, depth: int) -> None:
    run(4, lag, depth, seed=3, window=4, operations=700, next_handle=(1 << 64) - 20)


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@LAUNCHING
def test_random_histories_with_a_host_tier(
    block_size: int, lag: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens are worth a copy here; streams break with copies on the way."""
    monkeypatch.setattr(radix, "RETURN_WORTH", 4)
    moved = (0, 0)
    for seed, num_host_blocks in enumerate((20, 400)):
        shard = run(
            block_size, lag, depth, seed, 4, operations=700, num_host_blocks=num_host_blocks, breaks=0.005, renewals=0
        )
        moved = (moved[0] + shard.device.num_returned, moved[1] + shard.device.num_offloaded)
    assert min(moved) > 0


def run_under_grammars(
    masks: LateMasks, vocabulary: Vocabulary, block_size: int, lag: int, depth: int, seed: int, operations: int
) -> SchedulerCore:
    load = Workload(
        num_blocks=max(7, 120 // block_size + 2),
        block_size=block_size,
        window=4 + seed % 6,
        vocab_size=VOCAB_SIZE,
        operations=operations,
        siblings=0.2,
        patterns=PATTERNS,
    )
    shard = EngineUnderTest(load, lag, depth, masks=masks)

    def answer(request: ValidRequest) -> list[int]:
        prompt, count, seed = ids_of(request.prompt_ids), request.stopping.max_new_tokens, request.sampling.seed
        grammar = request.grammar
        if grammar is None:
            return expected_ids(prompt, count, seed, VOCAB_SIZE)
        return expected_under_grammar(vocabulary, grammar.source, prompt, count, seed, grammar.begins_at)

    def renew_cache() -> None:
        shard.engine.open()  # the process that is gone had masks of its own
        shard.renew_cache()

    core = drive(shard, renew_cache, answer, load, seed)
    assert shard.max_ahead <= load.window
    assert shard.engine.table.num_free == ROWS
    assert shard.engine.num_held == 0
    return core


@LAUNCHING
def test_random_histories_under_grammars(masks: LateMasks, vocabulary: Vocabulary, lag: int, depth: int) -> None:
    before = masks.num_late
    cores = [
        run_under_grammars(masks, vocabulary, block_size, lag, depth, seed, operations=400)
        for seed, block_size in enumerate((1, 4, 16))
    ]
    # Else the histories would prove little.
    assert masks.num_late - before > 100
    assert sum(core.stats.preemptions for core in cores) > 5
    assert sum(core.stats.inference_failure["decode"] for core in cores) > 0


def linked(load: Workload, lag: int, depth: int, rows: int = ROWS) -> tuple[EngineUnderTest, Link]:
    shard = EngineUnderTest(load, lag, depth, rows)
    core = SchedulerCore(SchedulerConfig(load.num_blocks, load.block_size), TOKENIZER, open_text)
    link = Link(core, shard)
    link.open()
    return shard, link


# A shard that dies faster than prompts are read again fails its requests in the end, as it should: not below 5.
@pytest.mark.parametrize(("every", "renewed"), [(3, False), (4, False), (7, False), (5, True), (7, True), (11, True)])
def test_a_break_after_every_nth_message_changes_no_answer(every: int, renewed: bool) -> None:
    load = Workload(num_blocks=40, block_size=4, window=6, vocab_size=VOCAB_SIZE)
    shard, link = linked(load, lag=1, depth=2)
    prompts = [[index, 7, *range(index)] for index in range(8)]
    sinks = [MemorySink() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        link.core.submit(make_request(prompt, 30), sink)
    delivered = 0
    for _ in range(5_000):
        if all(sink.num_ends for sink in sinks):
            break
        link.say()
        link.hear()
        link.advance()
        if link.deliver():
            delivered += 1
            if delivered % every == 0:
                if renewed:
                    shard.renew_cache()
                link.open()
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.error is None
        assert sink.ids == expected_ids(prompt, 30, 0, VOCAB_SIZE), "a token was changed, lost or sent twice"
        assert sink.finish is not None
        assert sink.finish.text == sink.text
    link.run()
    link.check()
    assert link.core.allocator.num_available == load.num_blocks - 1


@LAUNCHING
def test_a_router_that_sleeps_finds_the_shard_at_its_window(lag: int, depth: int) -> None:
    """There it stops, not earlier, since every row has room for that long (rule 6); and nothing is lost by it."""
    load = Workload(num_blocks=400, block_size=4, window=6, vocab_size=VOCAB_SIZE)
    shard, link = linked(load, lag, depth)
    prompts = [[index, 7, *range(index)] for index in range(ROWS)]
    sinks = [MemorySink() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        link.core.submit(make_request(prompt, 100), sink)
    rng, slept = random.Random(lag), 0
    while not all(sink.num_ends for sink in sinks):
        link.round()
        if rng.random() < 0.2:
            while link.hear() or link.advance():
                pass
            told = [step for step in link.steps if step.handles]
            if shard.engine.table.num_live and told:
                assert told[-1].number == shard.seen + load.window
                slept += 1
            while len(link.steps) > rng.randrange(3):
                link.deliver(rng.choice((1, 2, load.window)))
    assert slept > 5
    assert shard.max_ahead == load.window
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.ids == expected_ids(prompt, 100, 0, VOCAB_SIZE), "a token was changed, lost or sent twice"
    link.check()


def test_a_router_that_takes_over_starts_with_nothing_of_the_other() -> None:
    """As after a restart of the router while the old one's stream still hangs."""
    load = Workload(num_blocks=24, block_size=4, window=6, vocab_size=VOCAB_SIZE)
    shard, old = linked(load, lag=1, depth=2)
    sinks = [MemorySink() for _ in range(12)]
    for index, sink in enumerate(sinks[:6]):
        old.core.submit(make_request([index] * 9, 40), sink)
    old.until(lambda: len(sinks[0].ids) > 5)
    new = Link(SchedulerCore(SchedulerConfig(load.num_blocks, load.block_size), TOKENIZER, open_text), shard)
    new.open()
    assert shard.engine.table.num_live == 0
    for index, sink in enumerate(sinks[6:]):
        new.core.submit(make_request([index] * 9, 40), sink)
    new.run()
    for index, sink in enumerate(sinks[6:]):
        assert sink.ids == expected_ids([index] * 9, 40, 0, VOCAB_SIZE)
    new.check()


@pytest.mark.parametrize("seed", range(4))
def test_two_routers_that_take_the_stream_from_each_other(seed: int) -> None:
    """The newest wins, each time. Who is back finds nothing in the cache that the other has overwritten."""
    load = Workload(num_blocks=24, block_size=4, window=6, vocab_size=VOCAB_SIZE)
    shard, first = linked(load, lag=1, depth=2)
    second = Link(SchedulerCore(SchedulerConfig(load.num_blocks, load.block_size), TOKENIZER, open_text), shard)
    rng = random.Random(seed)
    asked: list[tuple[list[int], MemorySink]] = []
    for index in range(40):
        prompt = [index % 5] * rng.randrange(1, 30) + [index]
        asked.append((prompt, MemorySink()))
        (first, second)[index % 2].core.submit(make_request(prompt, 20), asked[-1][1])
    for turn in range(2_000):
        if all(sink.num_ends for _, sink in asked):
            break
        link = (first, second)[turn % 2]
        link.open()
        for _ in range(rng.randrange(8, 40)):
            link.round()
    for prompt, sink in asked:
        assert sink.error is None
        assert sink.ids == expected_ids(prompt, 20, 0, VOCAB_SIZE), "a token was changed, lost or sent twice"
    for link in (first, second):
        link.check()


def test_of_64_requests_one_is_poison_and_it_alone_fails() -> None:
    load = Workload(num_blocks=400, block_size=4, window=6, vocab_size=VOCAB_SIZE)
    shard, link = linked(load, lag=1, depth=2, rows=64)
    poison = pack([99, 98, 97])
    shard.device.poison = lambda admit: admit.prompt_ids == poison
    prompts = [[index, 5] for index in range(63)]
    prompts.insert(40, [99, 98, 97])
    sinks = [MemorySink() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        link.core.submit(make_request(prompt, 12), sink)
    link.run()
    failed = [index for index, sink in enumerate(sinks) if sink.error is not None]
    assert failed == [40]
    assert isinstance(sinks[40].error, GenerationFailed)
    assert "poisoned" in str(sinks[40].error)
    for index, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        if index != 40:
            assert sink.ids == expected_ids(prompt, 12, 0, VOCAB_SIZE)
    link.check()


@pytest.mark.soak
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@LAUNCHING
def test_many_random_histories(block_size: int, lag: int, depth: int) -> None:
    for seed in range(25):
        run(block_size, lag, depth, 1_000 + seed, 4 + seed % 8, operations=1_000)


@pytest.mark.soak
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@LAUNCHING
def test_many_random_histories_under_grammars(
    masks: LateMasks, vocabulary: Vocabulary, block_size: int, lag: int, depth: int
) -> None:
    for seed in range(15):
        run_under_grammars(masks, vocabulary, block_size, lag, depth, 1_000 + seed, operations=1_000)
