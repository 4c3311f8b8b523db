"""RowSpans: a span for each row whose request is traced, from its admission to its end. Knows no step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi.shard_client.messages import Admit

if TYPE_CHECKING:
    from tgi.observability.otlp import Span, Tracer

NAME = "generate_tokens"


class RowSpans:
    """State by row. Rows without a trace context have none: those of requests that nobody traces, and probes."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[int, Span] = {}

    def add(self, row: int, admit: Admit) -> None:
        if not admit.traceparent:
            return
        attributes = {
            "prompt_tokens": len(admit.prompt_ids) // 4,
            "cached_tokens": admit.cached_len,
            "resumed_tokens": len(admit.generated_ids) // 4,
        }
        self._spans[row] = self._tracer.begin(NAME, admit.traceparent, attributes)

    def end(self, row: int, num_generated: int, reason: str, error: str | None = None) -> None:
        """`num_generated`: tokens, those of earlier rows of the same request included."""
        span = self._spans.pop(row, None)
        if span is None:
            return
        span.tell({"generated_tokens": num_generated, "end_reason": reason})
        if error is not None:
            span.fail(error)
        span.end()
