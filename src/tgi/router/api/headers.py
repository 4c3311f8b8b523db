"""Headers of the generation routes: what a request says in them, and what an answer tells about itself."""

from __future__ import annotations

import hashlib
import re
from math import floor

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from tgi.errors import InvalidRequest
from tgi.observability.tracing import current_span
from tgi.router.backend import Finish

PRIORITY = "x-tgi-priority"
CLIENT = "x-tgi-client"
LONGEST_CLIENT = 64  # characters; longer names are kept as digests

# W3C trace context; version ff is forbidden, and so are ids of zeros.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")


def traceparent_of(request: Request) -> str:
    """The trace context for those who work for this request: that of its own span, or the caller's where it has
    none."""
    span = current_span()
    return traceparent_of_caller(request.scope) if span is None else span.traceparent


def traceparent_of_caller(scope: Scope) -> str:
    """ "" where there is none that is valid."""
    given = Headers(scope=scope).get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""


def priority_of(request: Request, in_body: int | None) -> int | None:
    """Higher goes first. The body's wins over the header's. Raises InvalidRequest for a header that is no i32."""
    given = request.headers.get(PRIORITY)
    if in_body is not None or given is None:
        return in_body
    priority = int(given) if _INTEGER.fullmatch(given.strip()) else None
    if priority is None or not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"the header `{PRIORITY}` must be an integer of 32 bits. Given: {given[:40]!r}", PRIORITY)
    return priority


def client_of(request: Request, in_body: str | None = None) -> str:
    """Who shares the server fairly with others; "" without a name.

    The header's wins over the body's `user`: a gateway that knows its tenants sets it, so that none of them gains by
    another `user` in each request.
    """
    name = request.headers.get(CLIENT) or in_body or ""
    if len(name) <= LONGEST_CLIENT:
        return name
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def stream_headers(compute_type: str, characters: int) -> list[tuple[bytes, bytes]]:
    """`characters`: of the prompt as the client wrote it."""
    return [(b"x-compute-type", compute_type.encode()), (b"x-compute-characters", b"%d" % characters)]


def answer_headers(compute_type: str, characters: int, *finishes: Finish) -> dict[str, str]:
    """Of one answer, or of the answers to several prompts: the sums then, and no x-compute-time, as TGI does it.

    Times in whole milliseconds, except x-compute-time (seconds).
    """
    totals = [finish.times.finished - finish.times.received for finish in finishes]
    inferences = [finish.times.finished - finish.times.admitted for finish in finishes]
    headers = {
        "x-compute-type": compute_type,
        "x-compute-time": f"{totals[0]:.9f}",
        "x-compute-characters": str(characters),
        "x-total-time": _ms(totals),
        "x-validation-time": _ms([finish.times.queued - finish.times.received for finish in finishes]),
        "x-queue-time": _ms([finish.times.admitted - finish.times.queued for finish in finishes]),
        "x-inference-time": _ms(inferences),
        "x-time-per-token": _ms(
            [inference / max(finish.num_generated, 1) for inference, finish in zip(inferences, finishes)]
        ),
        "x-prompt-tokens": str(sum(finish.num_prompt for finish in finishes)),
        "x-generated-tokens": str(sum(finish.num_generated for finish in finishes)),
    }
    if len(finishes) > 1:
        del headers["x-compute-time"]
    return headers


def _ms(seconds: list[float]) -> str:
    return str(sum(floor(one * 1000) for one in seconds))
