from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.fakes.collector import SERVER, Collector, names
from tgi.errors import StartupError
from tgi.observability.otlp import MAX_QUEUE, Tracer, _Reporting
from tgi.observability.tracing import current_span, entered, open_tracer

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE_ID}-{CALLER_ID}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def tracer(collector: Collector) -> Iterator[Tracer]:
    tracer = Tracer(collector.endpoint, "a-name")
    yield tracer
    tracer.close()


@pytest.mark.row("F: OTLP traces, traceparent")
def test_spans_come_as_they_were_told(collector: Collector, tracer: Tracer) -> None:
    before = time.time_ns()
    span = tracer.begin("work", CALLER, {"given": 1})
    span.tell({"parameters": "{}", "seed": "None"})
    now = time.perf_counter()
    part = span.child("part", now, now + 0.25)
    part.child("detail", now + 0.125, now + 0.25)
    span.end()
    own = span.traceparent
    tracer.close()
    work, seen_part = collector.named("work"), collector.named("part")
    assert (work.trace_id, work.parent_id, work.kind, work.service) == (TRACE_ID, CALLER_ID, SERVER, "a-name")
    assert own == f"{work.ids}-01"
    assert work.attributes == {"given": 1, "parameters": "{}", "seed": "None"}
    assert not work.is_error
    assert before - 1_000_000_000 < work.start <= work.end < time.time_ns() + 1_000_000_000
    assert seen_part.parent_id == work.span_id
    assert abs(seen_part.end - seen_part.start - 250_000_000) < 1000
    assert list(collector.children(seen_part)) == ["detail"]


def test_the_first_error_stays(collector: Collector, tracer: Tracer) -> None:
    span = tracer.begin("work")
    span.fail("first")
    span.fail("second")
    span.end()
    tracer.close()
    work = collector.named("work")
    assert (work.is_error, work.message) == (True, "first")


@pytest.mark.parametrize(
    "given", ["", "x", f"ff-{TRACE_ID}-{CALLER_ID}-01", f"00-{'0' * 32}-{CALLER_ID}-01", f"00-{TRACE_ID}-{CALLER_ID}"]
)
def test_what_is_no_trace_context_begins_a_trace(collector: Collector, tracer: Tracer, given: str) -> None:
    for _ in range(2):
        tracer.begin("work", given).end()
    tracer.close()
    assert [span.parent_id for span in collector.spans] == ["", ""]
    assert len({span.trace_id for span in collector.spans} | {TRACE_ID}) == 3


@pytest.mark.parametrize("form", ["http://127.0.0.1:{}", "127.0.0.1:{}", "http://127.0.0.1:{}/"])
def test_forms_of_an_endpoint(collector: Collector, form: str) -> None:
    tracer = Tracer(form.format(collector.port), "x")
    tracer.begin("work").end()
    tracer.close()
    assert names(collector.spans) == ["work"]


def test_a_collector_that_never_answers_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Three times what the queue holds goes in without waiting; and an end waits no longer than it was told."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        tracer = Tracer(f"http://127.0.0.1:{mute.getsockname()[1]}", "x")
        for _ in range(3 * MAX_QUEUE):
            tracer.begin("work").end()
        tracer.close(timeout_s=0.1)
    _wait_for_threads("close-tracer")
    assert [record.message for record in caplog.records if "cannot be delivered" not in record.message] == []
    assert len(caplog.records) <= 1


def test_an_absent_collector_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        tracer = Tracer(endpoint, "x")
        for _ in range(MAX_QUEUE):
            tracer.begin("work").end()
        tracer.close()
        _wait_for_threads("close-tracer")
    assert [record.message for record in caplog.records] == [
        f"Traces cannot be delivered to {endpoint} and are dropped until they can: check --otlp-endpoint"
    ]


class Sender(SpanExporter):
    def __init__(self, results: list[SpanExportResult]) -> None:
        self.results = results

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self.results.pop(0)


def test_a_collector_that_comes_back_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tgi")
    failure, success = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    sender = Sender([success, failure, failure, success, success, failure])
    reporting = _Reporting(sender, "there")
    while sender.results:
        reporting.export([])
    told = [(record.levelname, record.message.split(" there")[0]) for record in caplog.records]
    cannot = ("WARNING", "Traces cannot be delivered to")
    assert told == [cannot, ("INFO", "Traces are delivered to"), cannot]


def test_the_current_span(tracer: Tracer) -> None:
    span = tracer.begin("work")
    assert current_span() is None
    with entered(span):
        assert current_span() is span
    assert current_span() is None


def test_missing_packages_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tgi.observability.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(StartupError, match=r"^--otlp-endpoint needs the OpenTelemetry packages .*`tracing`"):
        open_tracer("http://127.0.0.1:4317", "x")


def test_an_endpoint_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(StartupError, match=r"^No traces can be sent to --otlp-endpoint http://x: .*soon"):
        open_tracer("http://x", "x")


def test_nothing_is_imported_without_an_endpoint() -> None:
    code = (
        "import sys; from tgi.observability.tracing import open_tracer; assert open_tracer(None, 'x') is None; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'grpc'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def _wait_for_threads(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30)
            assert not thread.is_alive()
