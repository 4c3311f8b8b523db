"""A collector of traces on a real socket: keeps what comes by OTLP over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 30.0
ERROR, SERVER = trace_pb2.Status.STATUS_CODE_ERROR, trace_pb2.Span.SPAN_KIND_SERVER


@dataclass(frozen=True)
class SeenSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "": a trace of its own
    kind: int
    start: int  # ns
    end: int  # ns
    attributes: dict[str, Any] = field(repr=False)
    is_error: bool
    message: str

    @property
    def ids(self) -> str:
        """As a traceparent has them: all of it but the flags."""
        return f"00-{self.trace_id}-{self.span_id}"


class Collector:
    """`with Collector() as collector:`. `port` 0: a free one."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[SeenSpan] = []
        self._changed = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(2, thread_name_prefix="collector"))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def take(self, spans: list[SeenSpan]) -> None:
        with self._changed:
            self.spans += spans
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[list[SeenSpan]], bool]) -> list[SeenSpan]:
        """All that has come once `condition` holds of it."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.spans), WAIT_S), self.spans
            return list(self.spans)

    def named(self, name: str) -> SeenSpan:
        """The one span of this name, waited for."""
        found = [span for span in self.wait_for(lambda spans: name in names(spans)) if span.name == name]
        assert len(found) == 1, found
        return found[0]

    def children(self, parent: SeenSpan) -> dict[str, SeenSpan]:
        """By name."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        assert all(span.trace_id == parent.trace_id for span in found)
        assert len(set(names(found))) == len(found)
        return {span.name: span for span in found}


def names(spans: list[SeenSpan]) -> list[str]:
    return [span.name for span in spans]


class _Service(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._collector.take(
            [
                _seen(span, _attributes(resource.resource.attributes)["service.name"])
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        )
        return trace_service_pb2.ExportTraceServiceResponse()


def _seen(span: Any, service: str) -> SeenSpan:
    return SeenSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        is_error=span.status.code == ERROR,
        message=span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
