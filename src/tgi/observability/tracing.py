"""Traces of requests: whether there are any, and which span the present one has. Knows no OpenTelemetry: `otlp` does,
which is imported when traces are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from tgi.errors import StartupError

if TYPE_CHECKING:
    from tgi.observability.otlp import Span, Tracer

_current: ContextVar[Span | None] = ContextVar("tgi.span", default=None)


def open_tracer(endpoint: str | None, service_name: str) -> Tracer | None:
    """None without an endpoint: then nothing is imported and nothing is kept. Raises StartupError."""
    if endpoint is None:
        return None
    try:
        from tgi.observability.otlp import Tracer
    except ImportError as error:
        raise StartupError(
            f"--otlp-endpoint needs the OpenTelemetry packages ({error}): "
            "install tgi with its extra `tracing`, or leave the flag out"
        ) from error
    return Tracer(endpoint, service_name)


def current_span() -> Span | None:
    """Of the request that this task serves; None where it is not traced."""
    return _current.get()


@contextmanager
def entered(span: Span) -> Iterator[None]:
    """Inside, and in tasks started inside, `span` is the current one."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)
