"""The loop of the one thread that owns the device: take commands -> launch step k+1 -> collect step k -> (grammars:
launch the choices of k+1) -> send step k.

Where launching is computing (CPU) at most one step is in flight, so the loop collects first. Nobody else touches the
engine: unary calls and stepping by hand are run here too, between two steps.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tgi.enums import Phase
from tgi.errors import GenerationFailed
from tgi.server.engine.engine import Engine
from tgi.server.engine.liveness import Liveness
from tgi.server.engine.outbox import Outbox
from tgi.shard_client.messages import Command

log = logging.getLogger(__name__)

T = TypeVar("T")

_WAKE = object()
TIDY_S = 60.0  # longest time without a collection


class Loop:
    """`post` and `call` are for any thread; everything else runs on the loop's own."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._outbox: Outbox | None = None
        self._stopping = False
        self._told_stalled = False
        self._collect_garbage = False
        self._collected_at = time.monotonic()
        self.failure: BaseException | None = None
        self.ended = threading.Event()

    # --- any thread --------------------------------------------------------

    def stop(self) -> None:
        """Ask the loop to end after its turn. Safe in a signal handler: it takes no lock."""
        self._stopping = True
        self._inbox.put(_WAKE)

    def post(self, outbox: Outbox, command: Command) -> None:
        """A command of the stream that `outbox` belongs to. Dropped when that stream is not the newest."""
        self._inbox.put((outbox, command))

    def wake(self) -> None:
        """Something that the loop may rest for has come."""
        self._inbox.put(_WAKE)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the device's thread, between two steps, and return what it returns."""
        future: Future[T] = Future()
        self._inbox.put((future, function))
        if self.ended.is_set():  # it may have ended before it saw the call
            self._refuse_calls()
        return future.result()

    # --- the device's thread -----------------------------------------------

    @property
    def engine(self) -> Engine | None:
        return self._engine

    @property
    def has_stream(self) -> bool:
        return self._outbox is not None

    def install(self, engine: Engine) -> None:
        """The engine that warm-up made. Only through `call`."""
        self._engine = engine
        self._liveness.enter(Phase.IDLE)
        gc.collect()
        gc.freeze()
        gc.disable()  # collections are made by hand, when idle

    def open_stream(self, outbox: Outbox, owner: str = "") -> None:
        """The newest stream wins: the one before it ends, and no row is left. Only through `call`."""
        assert self._engine is not None
        if self._outbox is not None:
            self._outbox.close("a newer stream took over")
        self._outbox = outbox
        self._told_stalled = False
        outbox.put(self._engine.open(owner))

    def close_stream(self, outbox: Outbox) -> None:
        """Only through `call`."""
        if self._outbox is outbox:
            self._outbox = None
            assert self._engine is not None
            self._engine.open()  # drops the rows
        outbox.close("the stream has ended")

    def run(self) -> None:
        """Until `stop`, or until the device fails (`failure`). The thread that calls this owns the device; on a CPU it
        must be the one that loaded the model too, since a second thread that computes would get a second pool of
        OpenMP threads beside the first."""
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # the device's state is unknown: the process ends and is started anew
            log.exception("the device's thread failed")
            self.failure = error
            self._liveness.enter(Phase.FAILED)
        finally:
            if self._outbox is not None:
                self._outbox.close("the model server has stopped")
            self.ended.set()
            self._refuse_calls()

    def _turn(self) -> None:
        engine, outbox = self._engine, self._outbox
        launched = False
        if engine is not None and outbox is not None:
            launched = self._launch(engine)
            if engine.num_in_flight and (engine.num_in_flight >= engine.depth or not launched):
                outbox.put(engine.collect())
                self._take(wait_s=0.0)
                self._tidy()
                return
        if launched:
            self._take(wait_s=0.0)
            return
        if engine is not None and outbox is not None and engine.window_is_open and self._has_news(engine):
            self._told_stalled = True
            if (step := engine.idle_step()) is not None:
                outbox.put(step)
        self._rest(engine)

    def _has_news(self, engine: Engine) -> bool:
        """Nothing runs: is there something to say? A row that waits for its grammar will go on by itself."""
        return engine.has_errors or not (self._told_stalled or engine.num_held)

    def _launch(self, engine: Engine) -> bool:
        if engine.num_in_flight >= engine.depth or not engine.window_is_open:
            return False
        started = time.perf_counter_ns()
        plan = engine.plan()
        if plan is None:
            return False
        self._told_stalled = False
        self._collect_garbage = True
        self._liveness.enter(Phase.RUNNING, plan.number, engine.estimate_s(plan.num_tokens))
        engine.launch(plan, time.perf_counter_ns() - started)
        return True

    def _rest(self, engine: Engine | None) -> None:
        """Nothing can run: wait for a command, beating while idle."""
        self._liveness.enter(Phase.IDLE, 0 if engine is None else engine.step_number)
        wait_s = min(0.05, self._liveness.beat_s) if self._collect_garbage else self._liveness.beat_s
        if engine is not None and engine.num_held and self._outbox is not None and engine.window_is_open:
            wait_s = min(wait_s, engine.patience_s)  # the next plan will end the row
        if not self._take(wait_s):
            if self._collect_garbage:
                self._collect_garbage = False
                self._collected_at = time.monotonic()
                gc.collect()
            elif engine is not None:
                engine.idle()

    def _tidy(self) -> None:
        """Collect garbage between two steps where load never lets the loop rest: what was made before is frozen, so
        this takes about a millisecond."""
        now = time.monotonic()
        if now - self._collected_at > TIDY_S:
            self._collected_at = now
            gc.collect()

    def _take(self, wait_s: float) -> bool:
        """Handle everything that has arrived; True when there was anything."""
        took = False
        while True:
            try:
                item = self._inbox.get(timeout=wait_s) if wait_s and not took else self._inbox.get_nowait()
            except queue.Empty:
                return took
            took = True
            self._handle(item)

    def _handle(self, item: object) -> None:
        match item:
            case (Future() as future, function):
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            case (Outbox() as outbox, Command() as command):
                if outbox is self._outbox and self._engine is not None:
                    # A bare `seen` changes nothing for a row: it must not draw another report of the same stall.
                    self._told_stalled = self._told_stalled and not command
                    try:
                        self._engine.apply(command)
                    except ValueError:
                        log.exception("a command cannot be obeyed: its stream ends")
                        self.close_stream(outbox)
            case _:
                pass

    def _refuse_calls(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            match item:
                case (Future() as future, _):
                    future.set_exception(GenerationFailed("the model server has stopped"))
                case _:
                    pass
