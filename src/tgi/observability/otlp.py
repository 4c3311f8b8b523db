"""Spans and their way to a collector: OTLP over gRPC, in batches, from a thread of its own.

The only module that imports OpenTelemetry. Knows no request: callers say what a span is called and what it tells.
Moments are those of time.perf_counter(), as everywhere in the programs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tgi.errors import StartupError

logger = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float | bool]

MAX_QUEUE = 8192
"""Spans that wait for the collector; what comes when it is full pushes out the oldest."""

BATCH_S = 1.0
FLUSH_S = 3.0
"""How long an end waits for what is not delivered yet."""

_propagator = TraceContextTextMapPropagator()


class Tracer:
    """Every method may be called from any thread, and none waits for the collector but `close`."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        """`endpoint`: `http://host:port`, `https://host:port`, or `host:port` without TLS. Raises StartupError."""
        # What its modules have to say of an absent collector, they say for every batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        try:
            sender = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
            self._exporter = _Reporting(sender, endpoint)
            processor = BatchSpanProcessor(self._exporter, MAX_QUEUE, BATCH_S * 1000)
        except Exception as error:  # whatever its own environment variables say wrongly
            raise StartupError(f"No traces can be sent to --otlp-endpoint {endpoint}: {error}") from error
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tgi")

    def begin(self, name: str, traceparent: str = "", attributes: Attributes | None = None) -> Span:
        """A span of work for a caller. `traceparent` is the caller's, by W3C trace context: one that is not valid
        counts as none, and a new trace begins."""
        caller = _propagator.extract({"traceparent": traceparent}, Context())
        offset = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            name, caller, trace.SpanKind.SERVER, attributes, start_time=time.perf_counter_ns() + offset
        )
        return Span(self._tracer, span, offset)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Send what is left, as far as the collector takes it in time."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracer", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # ends what it is at


class Span:
    """One piece of work that goes on. Not for several threads at once."""

    __slots__ = ("_has_failed", "_offset", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset: int) -> None:
        """`offset`: nanoseconds from time.perf_counter() to the clock's time, the same for all of a span's children:
        so they keep their order whatever is done to the clock meanwhile."""
        self._tracer = tracer
        self._span = span
        self._offset = offset
        self._has_failed = False

    @property
    def traceparent(self) -> str:
        """For whom this work is handed on to."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def tell(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, message: str) -> None:
        """The first message stays: later ones are its consequences."""
        if not self._has_failed:
            self._has_failed = True
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, message))

    def child(self, name: str, start: float, end: float) -> Span:
        """A part of this work that is over."""
        span = self._tracer.start_span(name, trace.set_span_in_context(self._span), start_time=self._clock(start))
        span.end(self._clock(end))
        return Span(self._tracer, span, self._offset)

    def end(self) -> None:
        self._span.end(time.perf_counter_ns() + self._offset)

    def _clock(self, moment: float) -> int:
        return round(moment * 1e9) + self._offset


class _Reporting(SpanExporter):
    """Says once that spans cannot be delivered, and once that they can again."""

    def __init__(self, sender: SpanExporter, endpoint: str) -> None:
        self._sender = sender
        self._endpoint = endpoint
        self._is_delivering = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._sender.export(spans)
        is_delivering = result is SpanExportResult.SUCCESS
        if is_delivering != self._is_delivering:
            self._is_delivering = is_delivering
            if is_delivering:
                logger.info("Traces are delivered to %s again", self._endpoint)
            else:
                logger.warning(
                    "Traces cannot be delivered to %s and are dropped until they can: check --otlp-endpoint",
                    self._endpoint,
                )
        return result

    def shutdown(self) -> None:
        self._sender.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._sender.force_flush(timeout_millis)
