from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.device import FakeDevice
from tests.fakes.masks import HANG_S, GatedCompiler
from tests.fakes.tiny_model import EOS_ID, write_tiny_llama
from tgi.enums import Phase
from tgi.errors import StartupError
from tgi.server.batch.step import StepPlan
from tgi.server.engine.engine import Limits
from tgi.server.engine.liveness import Liveness
from tgi.server.engine.loop import Loop
from tgi.server.engine.plan import PrefillBudget
from tgi.server.engine.service import NotWarm, Shard
from tgi.server.grammar.compiler import Compiler
from tgi.server.grammar.vocabulary import read_vocabulary
from tgi.shard_client.messages import (
    Admit,
    Command,
    Grammar,
    Health,
    Sampling,
    Step,
    Stopping,
    WarmupRequest,
    WarmupResult,
)

BLOCK = 4
REQUEST = WarmupRequest(max_batch_prefill_tokens=64, max_rows=4)


class WarmUp:
    """Fails once, then answers."""

    def __init__(self) -> None:
        self.fault: StartupError | None = StartupError("Not enough memory")

    def run(self, request: WarmupRequest) -> tuple[WarmupResult, Limits]:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        budget = PrefillBudget(64, 64, True)
        limits = Limits(8, budget, num_blocks=50, kv_epoch=1, decode_s=1.0, token_s=2.0)
        return WarmupResult(99, 100, 196, 50, BLOCK, request.max_rows), limits


class Noticed(Liveness):
    """Tells when the loop rests."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = threading.Event()

    def enter(self, phase: Phase, step: int = 0, estimate_s: float = 0.0) -> None:
        super().enter(phase, step, estimate_s)
        if phase is Phase.IDLE:
            self.idle.set()
        else:
            self.idle.clear()


class Watched(FakeDevice):
    """Notes the liveness word at each launch."""

    def __init__(self, liveness: Liveness) -> None:
        super().__init__(BLOCK)
        self.words: list[Health] = []
        self._liveness = liveness

    def launch(self, plan: StepPlan):
        self.words.append(self._liveness.read())
        return super().launch(plan)


class Running:
    def __init__(self, compiler: Compiler | None = None) -> None:
        self.liveness = Noticed()
        self.loop = Loop(self.liveness)
        self.device = Watched(self.liveness)
        self.shard = Shard(None, self.device, WarmUp(), self.loop, self.liveness, compiler)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.loop.stop()
    made.thread.join(20)


def test_a_shard_that_waits_for_its_warm_up_is_idle_also_after_one_that_failed(running: Running) -> None:
    assert running.liveness.idle.wait(20)
    with pytest.raises(StartupError):
        running.shard.warmup(REQUEST)
    assert running.liveness.idle.wait(20)
    with pytest.raises(NotWarm):
        running.shard.step_by_hand(Command(), ())
    assert running.shard.warmup(REQUEST).max_rows == 4


def test_a_step_by_hand_may_take_as_long_as_its_tokens_need(running: Running) -> None:
    with pytest.raises(StartupError):
        running.shard.warmup(REQUEST)
    running.shard.warmup(REQUEST)
    ids = array("I", range(1, 11)).tobytes()
    admit = Admit(1, ids, b"", 0, array("I", [1, 2, 3, 4]).tobytes(), Sampling(), Stopping(5))
    assert running.shard.step_by_hand(Command(admit=[admit]), [1], {1: 10}) is not None
    assert running.shard.step_by_hand(Command(), [1]) is not None
    assert [(word.phase, word.step) for word in running.device.words] == [(Phase.RUNNING, 1), (Phase.RUNNING, 2)]
    first, second = (word.hung_after_s for word in running.device.words)
    assert first > 20 * 10 * 2.0
    assert 20 * 2.0 < second < 20 * 10
    assert running.liveness.idle.wait(20)


def test_a_step_by_hand_waits_for_grammars_and_the_loop_does_not(tmp_path: Path) -> None:
    compiler = GatedCompiler(read_vocabulary(write_tiny_llama(tmp_path / "tiny"), 512))
    running = Running(compiler)
    steps: list[Step | None] = []
    try:
        with pytest.raises(StartupError):
            running.shard.warmup(REQUEST)
        running.shard.warmup(REQUEST)
        stopping = Stopping(5, eos_ids=(EOS_ID,))
        blocks = array("I", [1, 2]).tobytes()
        admit = Admit(1, b"\5\0\0\0", b"", 0, blocks, Sampling(), stopping, grammar=Grammar("regex", "[a-c]{3}"))
        caller = threading.Thread(target=lambda: steps.append(running.shard.step_by_hand(Command(admit=[admit]), [1])))
        caller.start()
        assert compiler.entered.wait(HANG_S)
        assert running.loop.call(lambda: running.loop.engine and running.loop.engine.step_number) == 0
        compiler.gate.set()
        caller.join(HANG_S)
        assert [list(step.handles) for step in steps if step is not None] == [[1]]
    finally:
        compiler.gate.set()
        running.loop.stop()
        running.thread.join(20)
