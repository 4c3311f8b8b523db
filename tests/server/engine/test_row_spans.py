from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from tests.fakes.collector import Collector, SeenSpan, names
from tests.fakes.device import FakeDevice
from tgi.observability.otlp import Tracer
from tgi.server.batch.table import RequestTable
from tgi.server.engine.engine import Engine, Limits
from tgi.server.engine.plan import PrefillBudget
from tgi.server.engine.row_spans import NAME, RowSpans
from tgi.shard_client.messages import Admit, Command, Sampling, Stopping

BLOCK, NUM_BLOCKS = 16, 200
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def pack(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def admit(handle: int, block: int, max_new: int, generated: Sequence[int] = (), traced: bool = True) -> Admit:
    return Admit(
        handle=handle,
        prompt_ids=pack([5, 6, 7]),
        generated_ids=pack(generated),
        cached_len=0,
        blocks=pack([block]),
        sampling=Sampling(),
        stopping=Stopping(max_new_tokens=max_new),
        traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01" if traced else "",
    )


@dataclass
class Traced:
    """An engine over a scripted device; its spans come once it is closed."""

    collector: Collector
    tracer: Tracer = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.tracer = Tracer(self.collector.endpoint, "test-shard")
        limits = Limits(1000, PrefillBudget(64, 16, True), NUM_BLOCKS, kv_epoch=1)
        self.engine = Engine(FakeDevice(BLOCK), RequestTable(4, BLOCK), limits, spans=RowSpans(self.tracer))
        self.engine.open()

    def spans(self) -> list[SeenSpan]:
        self.tracer.close()
        return self.collector.spans


@pytest.fixture
def traced() -> Iterator[Traced]:
    with Collector() as collector:
        traced = Traced(collector)
        yield traced
        traced.tracer.close()


@pytest.mark.row("F: OTLP traces, traceparent")
def test_a_row_is_a_child_of_its_request(traced: Traced) -> None:
    traced.engine.apply(Command(admit=[admit(1, 1, max_new=4)]))
    while traced.engine.step() is not None:
        pass
    (span,) = traced.spans()
    assert (span.name, span.service, span.trace_id, span.parent_id) == (NAME, "test-shard", TRACE_ID, PARENT_ID)
    assert span.attributes == {
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "resumed_tokens": 0,
        "generated_tokens": 4,
        "end_reason": "length",
    }
    assert not span.is_error


def test_a_row_that_comes_back_has_a_span_of_its_own(traced: Traced) -> None:
    traced.engine.apply(Command(admit=[admit(1, 1, max_new=6)]))
    first, second = traced.engine.step(), traced.engine.step()
    assert first is not None
    assert second is not None
    traced.engine.apply(Command(cancel=[1]))
    generated = [*first.token_ids, *second.token_ids]
    traced.engine.apply(Command(admit=[admit(2, 2, max_new=6, generated=generated)]))
    while traced.engine.step() is not None:
        pass
    keys = ("resumed_tokens", "generated_tokens", "end_reason")
    told = [[span.attributes[key] for key in keys] for span in traced.spans()]
    assert told == [[0, 2, "cancelled"], [2, 6, "length"]]


def test_a_row_that_fails(traced: Traced) -> None:
    traced.engine.apply(Command(admit=[admit(1, 1, max_new=4)]))
    traced.engine.apply(Command(grow=[(1, pack([NUM_BLOCKS]))]))
    (span,) = traced.spans()
    assert span.is_error
    assert span.message.startswith("a block number is outside")
    assert span.attributes["end_reason"] == "invalid"


def test_nobody_traces_the_others(traced: Traced) -> None:
    requests = [admit(1, 1, max_new=2, traced=False), admit(2, 2, max_new=2)]
    traced.engine.apply(Command(admit=requests))
    while traced.engine.step() is not None:
        pass
    assert names(traced.spans()) == [NAME]


def test_a_lost_stream_ends_its_rows(traced: Traced) -> None:
    traced.engine.apply(Command(admit=[admit(1, 1, max_new=4), admit(2, 2, max_new=4)]))
    traced.engine.open()
    assert [span.attributes["end_reason"] for span in traced.spans()] == ["cancelled", "cancelled"]
