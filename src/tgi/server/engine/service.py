"""Shard: what the RPC rooms may ask of a running model server. Joins warm-up, engine and loop; knows no protobuf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tgi.enums import Phase
from tgi.errors import GenerationFailed, InvalidRequest
from tgi.server.batch.table import RequestTable
from tgi.server.engine.device import Device
from tgi.server.engine.engine import Engine
from tgi.server.engine.liveness import Liveness
from tgi.server.engine.loop import Loop
from tgi.server.engine.outbox import Outbox
from tgi.server.engine.row_spans import RowSpans
from tgi.server.engine.warmup import WarmUp
from tgi.server.grammar.compiler import Compiler
from tgi.server.grammar.mask import PATIENCE_S, Masks
from tgi.shard_client.messages import Command, Health, ShardInfo, Step, WarmupRequest, WarmupResult


class NotWarm(InvalidRequest):
    """The KV cache has no size yet: Warmup comes first."""


class StreamIsOpen(InvalidRequest):
    """Stepping by hand is refused while a router holds the stream."""


class Shard:
    """Every method may be called from any thread."""

    def __init__(
        self,
        info: ShardInfo,
        device: Device,
        warm_up: WarmUp,
        loop: Loop,
        liveness: Liveness,
        compiler: Compiler | None = None,
        spans: RowSpans | None = None,
        tamper: Callable[[Step], Step] | None = None,
        tell_finished: Callable[[int], None] | None = None,
    ) -> None:
        """`compiler`: None refuses grammars. `spans`: None where nobody traces. `tamper`: breaks the stream's Steps, in
        tests. `tell_finished` hears how many rows have finished, whenever one has."""
        self._device = device
        self._tell_finished = tell_finished
        self.tamper = tamper
        self._info = info
        self._masks = None if compiler is None else Masks(compiler, loop.wake)
        self._spans = spans
        self._warm_up = warm_up
        self._loop = loop
        self._liveness = liveness
        self._warm: WarmupResult | None = None

    def info(self) -> ShardInfo:
        return self._info

    def health(self) -> Health:
        engine = self._loop.engine
        return replace(self._liveness.read(), finished=0 if engine is None else engine.finished)

    @property
    def warm(self) -> WarmupResult | None:
        return self._warm

    def warmup(self, request: WarmupRequest) -> WarmupResult:
        """Size the cache. Once: a later call, whatever it asks, returns the first answer."""
        return self._loop.call(lambda: self._warmup(request))

    def _warmup(self, request: WarmupRequest) -> WarmupResult:
        if self._warm is None:
            self._liveness.enter(Phase.COMPILING)
            result, limits = self._warm_up.run(request)
            table = RequestTable(result.max_rows, result.block_size)
            self._loop.install(Engine(self._device, table, limits, self._masks, self._spans, self._tell_finished))
            self._warm = result
        return self._warm

    # --- the stream (generate.v4) -------------------------------------------

    def open_stream(self, outbox: Outbox, owner: str = "") -> None:
        """The newest stream wins. `owner`: a name that its router keeps while it runs. Raises NotWarm before the first
        Warmup."""

        def opening() -> None:
            if self._warm is None:
                raise NotWarm("call Warmup before Generate")
            self._loop.open_stream(outbox, owner)

        self._loop.call(opening)

    def post(self, outbox: Outbox, command: Command) -> None:
        self._loop.post(outbox, command)

    def close_stream(self, outbox: Outbox) -> None:
        with suppress(GenerationFailed):  # the loop has ended, and its stream before
            self._loop.call(lambda: self._loop.close_stream(outbox))

    def clear(self) -> None:
        """Drop all rows that are stepped by hand; a stream's rows are the router's."""

        def clearing() -> None:
            engine = self._loop.engine
            if engine is not None and not self._loop.has_stream:
                engine.open()

        self._loop.call(clearing)

    # --- stepping by hand (generate.v3) --------------------------------------

    def step_by_hand(
        self, command: Command, handles: Sequence[int], chunk_lens: Mapping[int, int] | None = None
    ) -> Step | None:
        """Apply `command`, then run exactly these rows for one step: launch and collect, with nothing in between. Rows
        whose grammars are not ready yet are waited for, on the caller's thread.

        `handles` may be empty: only the command is applied. Raises StreamIsOpen while a router holds the stream,
        NotWarm before the cache has a size.
        """

        def engine_by_hand() -> Engine:
            if self._loop.has_stream:
                raise StreamIsOpen("a generate.v4 stream is open: generate.v3 calls are refused until it ends")
            if self._loop.engine is None:
                raise NotWarm("call Warmup first")
            return self._loop.engine

        def applying() -> list[int]:
            engine = engine_by_hand()
            engine.disown()
            engine.apply(command)
            return engine.rows_under_grammar(handles)

        def stepping() -> Step | None:
            engine = engine_by_hand()
            num_tokens = len(handles) + sum((chunk_lens or {}).values())
            self._liveness.enter(Phase.RUNNING, engine.step_number + 1, engine.estimate_s(num_tokens))
            return engine.step(handles, chunk_lens)

        rows = self._loop.call(applying)
        if not handles:
            return None
        if rows and self._masks is not None:
            self._masks.wait(rows, PATIENCE_S)  # who is not ready then has failed
        return self._loop.call(stepping)
