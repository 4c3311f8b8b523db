from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator

import pytest

from tests.fakes.device import Corrupt, FakeDevice, expected_ids
from tgi.enums import Phase
from tgi.errors import GenerationFailed
from tgi.server.batch.table import RequestTable
from tgi.server.engine.engine import Engine, Limits
from tgi.server.engine.liveness import Liveness
from tgi.server.engine.loop import Loop
from tgi.server.engine.outbox import Outbox
from tgi.server.engine.plan import PrefillBudget
from tgi.shard_client.messages import Admit, Command, Sampling, Step, Stopping

BLOCK = 4


def pack(*ids: int) -> bytes:
    return array("I", ids).tobytes()


def admit(handle: int, prompt: tuple[int, ...], max_new: int, first_block: int) -> Admit:
    count = (len(prompt) + max_new) // BLOCK + 1
    blocks = pack(*range(first_block, first_block + count))
    return Admit(handle, pack(*prompt), b"", 0, blocks, Sampling(seed=handle), Stopping(max_new))


class Running:
    def __init__(self, device: FakeDevice, window: int) -> None:
        self.liveness = Liveness()
        self.loop = Loop(self.liveness)
        limits = Limits(window, PrefillBudget(64, 64, True), num_blocks=300, kv_epoch=1)
        engine = Engine(device, RequestTable(8, BLOCK), limits)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()
        self.loop.call(lambda: self.loop.install(engine))

    def stop(self) -> None:
        self.loop.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()

    def stream(self) -> Outbox:
        outbox = Outbox()
        self.loop.call(lambda: self.loop.open_stream(outbox))
        opening = outbox.take()
        assert opening is not None
        assert opening.opening is not None
        return outbox


@pytest.fixture(params=[(0, 1), (1, 2)], ids=["plain", "overlapped"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    lag, depth = request.param
    made = Running(FakeDevice(BLOCK, lag=lag, depth=depth), window=8)
    yield made
    made.stop()


def drain(loop: Loop, outbox: Outbox, count: int, seen_every: int = 1) -> tuple[dict[int, list[int]], list[Step]]:
    """Take steps until `count` rows have ended, answering `seen`."""
    ids: dict[int, list[int]] = {}
    steps: list[Step] = []
    ended = 0
    while ended < count:
        step = outbox.take()
        assert step is not None
        steps.append(step)
        position = 0
        for index, handle in enumerate(step.handles):
            number = step.num_tokens[index] if step.num_tokens else 1
            ids.setdefault(handle, []).extend(step.token_ids[position : position + number])
            position += number
            ended += step.end_of(index) != 0
        if len(steps) % seen_every == 0:
            loop.post(outbox, Command(seen=step.number))
    return ids, steps


def test_rows_run_to_their_end(running: Running) -> None:
    outbox = running.stream()
    running.loop.post(outbox, Command(admit=[admit(1, (1, 2), 20, 1), admit(2, (3,), 7, 40)]))
    ids, steps = drain(running.loop, outbox, 2)
    assert ids == {1: expected_ids([1, 2], 20, 1, 1000), 2: expected_ids([3], 7, 2, 1000)}
    numbers = [step.number for step in steps]
    assert numbers == sorted(set(numbers))


def test_the_loop_stops_at_the_window_until_seen(running: Running) -> None:
    outbox = running.stream()
    running.loop.post(outbox, Command(admit=[admit(1, (1,), 30, 1)]))
    steps: list[int] = []
    while not steps or steps[-1] < 8:
        step = outbox.take()
        assert step is not None
        steps.append(step.number)
    # Nothing more comes: the engine itself says that its window is closed, on its own thread.
    assert running.loop.call(lambda: running.loop.engine is not None and not running.loop.engine.window_is_open)
    running.loop.post(outbox, Command(seen=8))
    ids, _ = drain(running.loop, outbox, 1)
    assert len(ids[1]) == 22


def test_rows_without_room_are_reported_once(running: Running) -> None:
    outbox = running.stream()
    request = Admit(1, pack(1, 2), b"", 0, pack(1), Sampling(), Stopping(20))
    running.loop.post(outbox, Command(admit=[request]))
    waiting = 0
    while not waiting:
        step = outbox.take()
        assert step is not None
        waiting = step.rows_waiting
        running.loop.post(outbox, Command(seen=step.number))

    def number() -> int:
        assert running.loop.engine is not None
        return running.loop.engine.step_number

    # The stall is told in one Step at most; a bare `seen` draws no other.
    last = running.loop.call(number)
    for _ in range(5):
        running.loop.post(outbox, Command(seen=last))
        assert running.loop.call(number) <= 4
    running.loop.post(outbox, Command(grow=[(1, pack(2, 3, 4, 5, 6))]))
    ids, _ = drain(running.loop, outbox, 1)
    assert ids[1][-1] == expected_ids([1, 2], 20, 0, 1000)[-1]


def test_the_newest_stream_wins(running: Running) -> None:
    first = running.stream()
    running.loop.post(first, Command(admit=[admit(1, (1,), 30, 1)]))
    second = running.stream()
    while first.take() is not None:
        pass
    assert first.closed_because == "a newer stream took over"
    running.loop.post(first, Command(admit=[admit(5, (1,), 3, 1)]))  # of the old stream: dropped
    running.loop.post(second, Command(admit=[admit(1, (9,), 3, 1)]))
    ids, _ = drain(running.loop, second, 1)
    assert ids == {1: expected_ids([9], 3, 1, 1000)}
    assert running.loop.call(lambda: running.loop.engine and running.loop.engine.table.num_live) == 0


def test_a_closed_stream_leaves_no_row(running: Running) -> None:
    outbox = running.stream()
    running.loop.post(outbox, Command(admit=[admit(1, (1,), 30, 1)]))
    running.loop.call(lambda: running.loop.close_stream(outbox))
    assert not running.loop.has_stream
    assert running.loop.call(lambda: running.loop.engine and running.loop.engine.table.num_live) == 0


def test_calls_return_and_raise_on_the_callers_thread(running: Running) -> None:
    assert running.loop.call(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        running.loop.call(lambda: 1 // 0)
    assert running.loop.call(lambda: 3) == 3


def test_health_reads_the_word_without_asking_the_thread(running: Running) -> None:
    entered, release = threading.Event(), threading.Event()

    def busy() -> None:
        entered.set()
        release.wait(20)

    caller = threading.Thread(target=lambda: running.loop.call(busy))
    caller.start()
    entered.wait(20)
    assert running.liveness.read().phase in (Phase.IDLE, Phase.RUNNING)
    assert not running.liveness.read().is_hung
    release.set()
    caller.join(20)


def test_a_broken_device_ends_the_thread_and_refuses_what_waits() -> None:
    class Broken(FakeDevice):
        def collect(self, launched: object):
            raise Corrupt("the device is gone")

    running = Running(Broken(BLOCK), window=8)
    outbox = running.stream()
    running.loop.post(outbox, Command(admit=[admit(1, (1,), 3, 1)]))
    assert outbox.take() is None
    assert running.loop.ended.wait(20)
    assert isinstance(running.loop.failure, Corrupt)
    assert running.liveness.read().phase == Phase.FAILED
    with pytest.raises(GenerationFailed):
        running.loop.call(lambda: None)
    running.stop()
