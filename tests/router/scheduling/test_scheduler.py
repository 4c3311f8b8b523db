"""The asyncio side: one Command per turn of the loop, order kept under slices, a shard that goes and comes back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable

import pytest

from tests.fakes.scheduling import TOKENIZER, MemorySink, make_request
from tests.fakes.scripted_shard import PlainShard, reference
from tgi.enums import Phase
from tgi.errors import ContextTooLong, Overloaded, StartupError, TgiError, Unavailable
from tgi.router.backend import Backend, TokenEvent
from tgi.router.scheduling import scheduler as scheduler_module
from tgi.router.scheduling.core import SchedulerConfig
from tgi.router.scheduling.scheduler import Scheduler
from tgi.shard_client.messages import Command, Health, Step


class MemoryStream:
    """The stream of a PlainShard: it steps whenever somebody reads and there is something to do."""

    def __init__(self, shard: PlainShard) -> None:
        self.shard = shard
        self.opening: Step | None = shard.open()
        self.has_commands = asyncio.Event()
        self.error: Exception | None = None
        self.is_closed = False

    def send(self, command: Command) -> None:
        self.shard.apply(command)
        self.has_commands.set()

    def break_off(self) -> None:
        self.error = Unavailable("gone")
        self.has_commands.set()

    async def __aiter__(self) -> AsyncIterator[Step]:
        while not self.is_closed:
            await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            if self.opening is not None:
                opening, self.opening = self.opening, None
                yield opening
                continue
            step = self.shard.advance()
            if step is not None:
                yield step
                continue
            self.has_commands.clear()
            await self.has_commands.wait()

    async def close(self) -> None:
        self.is_closed = True
        self.has_commands.set()


class MemoryShard:
    def __init__(self, shard: PlainShard) -> None:
        self.shard = shard
        self.streams: list[MemoryStream] = []
        self.is_away = False
        self.num_refused = 0
        self.answer = Health(Phase.RUNNING, 1, 0.0, 30.0)

    def stream(self) -> MemoryStream:
        if self.is_away:
            self.num_refused += 1
            raise Unavailable("nobody listens")
        self.streams.append(MemoryStream(self.shard))
        return self.streams[-1]

    async def health(self, timeout_s: float, /) -> Health:
        if self.is_away:
            raise Unavailable("nobody listens")
        return self.answer


class WaitingSink(MemorySink):
    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    def token(self, event: TokenEvent) -> None:
        super().token(event)
        if event.finish is not None:
            self.ended.set()

    def fail(self, error: TgiError) -> None:
        super().fail(error)
        self.ended.set()


async def until(condition: Callable[[], object], longest_s: float = 20.0) -> None:
    deadline = time.monotonic() + longest_s
    for _ in itertools.takewhile(lambda _: not condition(), itertools.count()):
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0)


def make(shard: MemoryShard, **config: float) -> Scheduler:
    opening = shard.shard.opening
    return Scheduler(shard, TOKENIZER, SchedulerConfig(opening.num_blocks, opening.block_size, **config))  # pyright: ignore[reportArgumentType]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "RECONNECT_S", (0.0, 0.001))
    monkeypatch.setattr(scheduler_module, "EXPIRE_S", 0.001)


async def started(shard: MemoryShard, **config: float) -> Scheduler:
    scheduler = make(shard, **config)
    await scheduler.start(5.0)
    return scheduler


def test_requests_of_one_turn_leave_in_one_command() -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard())
        scheduler = await started(shard)
        backend: Backend = scheduler
        sinks = [WaitingSink() for _ in range(5)]
        for n, sink in enumerate(sinks):
            backend.schedule(make_request(range(n + 1), 6), sink)
        await asyncio.gather(*(sink.ended.wait() for sink in sinks))
        assert [len(command.admit) for command in shard.shard.log if command.admit] == [5]
        for n, sink in enumerate(sinks):
            assert sink.ids == reference(make_request(range(n + 1)).prompt_ids, 6, 50)
        await scheduler.close()

    asyncio.run(main())


def test_a_cancel_is_told_within_the_turn() -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard())
        scheduler = await started(shard)
        sink, other = WaitingSink(), WaitingSink()
        ticket = scheduler.schedule(make_request(range(5), 200), sink)
        await until(lambda: sink.events)
        ticket.cancel()
        ticket.cancel()
        await asyncio.sleep(0)
        assert not shard.shard.rows
        before = len(sink.events)
        scheduler.schedule(make_request(range(5), 6), other)
        await other.ended.wait()
        assert (len(sink.events), sink.num_ends) == (before, 0)
        await scheduler.close()

    asyncio.run(main())


def test_a_long_step_lets_others_run_and_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "SLICE_S", 0.0)

    async def main() -> None:
        shard = MemoryShard(PlainShard(max_rows=64, num_blocks=400, prefill_budget=1_000))
        scheduler = await started(shard)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count_turns())
        sinks = [WaitingSink() for _ in range(64)]
        tickets = [scheduler.schedule(make_request([n % 50, n], 20), sink) for n, sink in enumerate(sinks)]
        await until(lambda: sinks[-1].events)
        tickets[40].cancel()  # perhaps in the middle of a Step
        await asyncio.gather(*(sink.ended.wait() for n, sink in enumerate(sinks) if n != 40))
        steps = shard.shard.number
        assert turns > 3 * steps, "a Step of 64 rows is four slices"
        for n, sink in enumerate(sinks):
            expected = reference(make_request([n % 50, n]).prompt_ids, 20, 50)
            assert sink.ids == (expected if n != 40 else expected[: len(sink.ids)])
            assert not sink.faults
        counter.cancel()
        await scheduler.close()

    asyncio.run(main())


@pytest.mark.fault("TGI#2593")
def test_a_shard_that_comes_back_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard())
        scheduler = await started(shard)
        sinks = [WaitingSink() for _ in range(3)]
        for n, sink in enumerate(sinks):
            scheduler.schedule(make_request(range(n + 1), 40), sink)
        await until(lambda: len(sinks[0].events) >= 10)
        assert await scheduler.is_healthy()
        shard.is_away = True
        shard.streams[-1].break_off()
        await until(lambda: shard.num_refused >= 3)
        assert not await scheduler.is_healthy()
        late = WaitingSink()
        scheduler.schedule(make_request(range(9), 5), late)
        shard.shard.renew_cache(2)
        shard.is_away = False
        await asyncio.gather(*(sink.ended.wait() for sink in [*sinks, late]))
        for n, sink in enumerate(sinks):
            assert sink.ids == reference(make_request(range(n + 1)).prompt_ids, 40, 50)
        assert len(late.ids) == 5
        assert await scheduler.is_healthy()
        await scheduler.close()

    asyncio.run(main())
    assert caplog.text.count("lost the model server") == 1


def test_a_shard_that_was_started_again_is_warmed_up_before_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard())
        answers: list[Exception | None] = [Unavailable("it loads"), StartupError("it does not fit"), None]
        opened: list[int] = []

        async def prepare() -> None:
            opened.append(len(shard.streams))
            answer = answers.pop(0)
            if answer is not None:
                raise answer

        opening = shard.shard.opening
        config = SchedulerConfig(opening.num_blocks, opening.block_size)
        scheduler = Scheduler(shard, TOKENIZER, config, prepare=prepare)
        await scheduler.start(5.0)
        assert not opened, "whoever starts us has warmed it up"
        sinks = [WaitingSink() for _ in range(3)]
        tickets = [scheduler.schedule(make_request(range(n + 1), 40), sink) for n, sink in enumerate(sinks)]
        await until(lambda: sinks[0].events)
        shard.shard.renew_cache(2)
        shard.streams[-1].break_off()
        await until(lambda: opened)
        assert not await scheduler.is_healthy()
        tickets[1].cancel()  # a client leaves while nobody is there
        assert scheduler.stats.queue_size == 2
        await asyncio.gather(sinks[0].ended.wait(), sinks[2].ended.wait())
        assert opened == [1, 1, 1]
        for n in (0, 2):
            assert sinks[n].ids == reference(make_request(range(n + 1)).prompt_ids, 40, 50)
        assert not sinks[1].num_ends
        await scheduler.close()

    asyncio.run(main())
    assert sum("model server" in record.message for record in caplog.records if record.levelname == "WARNING") == 1


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_shard_that_says_that_it_cannot_go_on_is_believed_after_a_while(patience_s: float) -> None:
    """At first the memory of the process before may not be free yet."""

    async def main() -> None:
        shard = MemoryShard(PlainShard())
        num_asked = 0

        async def prepare() -> None:
            nonlocal num_asked
            num_asked += 1
            raise StartupError("it does not fit")

        opening = shard.shard.opening
        config = SchedulerConfig(opening.num_blocks, opening.block_size, unavailable_after_s=patience_s)
        scheduler = Scheduler(shard, TOKENIZER, config, prepare=prepare)
        await scheduler.start(5.0)
        sink = WaitingSink()
        scheduler.schedule(make_request(range(5), 40), sink)
        await until(lambda: sink.events)
        shard.streams[-1].break_off()
        await until(lambda: num_asked > 3)
        if patience_s:
            assert not sink.num_ends
        else:
            assert isinstance(sink.error, Unavailable)
            assert str(sink.error) == "the model server cannot go on: it does not fit"
            assert scheduler.stats.queue_size == 0
        await scheduler.close()

    asyncio.run(main())


def test_without_a_shard_for_long_requests_are_refused() -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard())
        scheduler = await started(shard, unavailable_after_s=0.0)
        shard.is_away = True
        shard.streams[-1].break_off()
        await until(lambda: not scheduler.core.is_open)
        with pytest.raises(Unavailable):
            scheduler.schedule(make_request(), WaitingSink())
        await scheduler.close()

    asyncio.run(main())


def test_a_shard_that_never_answers_is_told_at_the_start() -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard())
        shard.is_away = True
        with pytest.raises(Unavailable, match="did not open a stream"):
            await make(shard).start(0.01)

    asyncio.run(main())


@pytest.mark.fault("sglang#4191")
@pytest.mark.parametrize(
    ("health", "is_healthy"),
    [
        (Health(Phase.RUNNING, 1, 29.0, 30.0), True),
        (Health(Phase.RUNNING, 1, 31.0, 30.0), False),
        (Health(Phase.FAILED, 1, 0.0, 30.0), False),
        (Health(Phase.IDLE, 1, 0.0, 30.0), True),
    ],
)
def test_health_is_the_shards_own_word(health: Health, is_healthy: bool) -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard())
        scheduler = await started(shard)
        shard.answer = health
        assert await scheduler.is_healthy() == is_healthy
        assert not shard.shard.log, "it runs no generation"
        await scheduler.close()

    asyncio.run(main())


def test_the_queue_timeout() -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard(max_rows=1, num_blocks=4_000))
        scheduler = await started(shard, queue_timeout_s=0.02)
        running, waiting = WaitingSink(), WaitingSink()
        ticket = scheduler.schedule(make_request(range(5), 50_000), running)
        scheduler.schedule(make_request(range(5), 5), waiting)
        await waiting.ended.wait()
        assert isinstance(waiting.error, Overloaded)
        assert running.num_ends == 0
        ticket.cancel()
        await scheduler.close()

    asyncio.run(main())


def test_a_refused_request_leaves_nothing() -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard(num_blocks=4))
        scheduler = await started(shard)
        with pytest.raises(ContextTooLong):
            scheduler.schedule(make_request(range(5), 1_000), WaitingSink())
        assert scheduler.stats.queue_size == 0
        await scheduler.close()

    asyncio.run(main())


@pytest.mark.fault("sglang#6888")
@pytest.mark.parametrize("where", ["a step", "a command"])
def test_a_fault_of_ours_starts_over_instead_of_ending_the_service(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard())
        scheduler = await started(shard)
        sinks = [WaitingSink() for _ in range(3)]
        for n, sink in enumerate(sinks):
            scheduler.schedule(make_request(range(n + 1), 30), sink)
        await until(lambda: len(sinks[0].events) >= 5)
        doubtful = scheduler.core.allocator
        name = "_count" if where == "a step" else "next_command"
        with monkeypatch.context() as patch:

            def fail(*arguments: object) -> None:
                patch.undo()
                raise AssertionError("the books are wrong")

            patch.setattr(scheduler.core, name, fail)
            await until(lambda: len(shard.streams) == 2)
        await asyncio.gather(*(sink.ended.wait() for sink in sinks))
        for n, sink in enumerate(sinks):
            assert sink.ids == reference(make_request(range(n + 1)).prompt_ids, 30, 50)
        assert scheduler.core.allocator is not doubtful
        scheduler.core.allocator.check([])
        await scheduler.close()

    asyncio.run(main())
    assert "the books are wrong" in caplog.text


def test_used_up_handles_open_a_new_stream() -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard(max_rows=1))
        scheduler = await started(shard)
        scheduler.core.rows.next_handle = (1 << 64) - 2
        sinks = [WaitingSink() for _ in range(6)]
        tickets = [scheduler.schedule(make_request(range(n + 1), 20), sink) for n, sink in enumerate(sinks)]
        await until(lambda: len(sinks[1].events) > 3)
        tickets[1].cancel()  # the last handle goes without a Step that tells of it
        await asyncio.gather(*(sink.ended.wait() for n, sink in enumerate(sinks) if n != 1))
        assert [len(sink.ids) for n, sink in enumerate(sinks) if n != 1] == [20] * 5
        assert len(shard.streams) == 2
        await scheduler.close()

    asyncio.run(main())


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_a_server_that_ends_does_not_wait_for_a_lost_shard(is_lost_first: bool) -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard(max_rows=1, num_blocks=4_000))
        scheduler = await started(shard)
        sinks = [WaitingSink() for _ in range(3)]
        for sink in sinks:
            scheduler.schedule(make_request(range(5), 50_000), sink)
        await until(lambda: sinks[0].events)
        shard.is_away = True
        if is_lost_first:
            shard.streams[-1].break_off()
            await until(lambda: shard.num_refused)
            assert not any(sink.error for sink in sinks)
            scheduler.stop_waiting()
        else:
            scheduler.stop_waiting()
            before = len(sinks[0].events)
            await until(lambda: len(sinks[0].events) > before)  # while the shard is there, requests run on
            shard.streams[-1].break_off()
            await until(lambda: all(sink.ended.is_set() for sink in sinks))
        assert all(isinstance(sink.error, Unavailable) for sink in sinks)
        with pytest.raises(Unavailable):
            scheduler.schedule(make_request(), WaitingSink())
        await scheduler.close()

    asyncio.run(main())


def test_closing_answers_everybody() -> None:
    async def main() -> None:
        shard = MemoryShard(PlainShard(max_rows=1, num_blocks=4_000))
        scheduler = await started(shard)
        sinks = [WaitingSink() for _ in range(3)]
        for sink in sinks:
            scheduler.schedule(make_request(range(5), 50_000), sink)
        await until(lambda: sinks[0].events)
        await scheduler.close()
        assert all(isinstance(sink.error, Unavailable) for sink in sinks)

    asyncio.run(main())
