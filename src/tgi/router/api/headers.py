"""Headers of the generation routes: the trace that a request belongs to, and what an answer tells about itself."""

from __future__ import annotations

import re
from math import floor

from starlette.requests import Request

from tgi.router.backend import Finish

# W3C trace context; version ff is forbidden.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(request: Request) -> str:
    """The caller's trace context, "" where there is none that is valid."""
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""


def stream_headers(compute_type: str, characters: int) -> list[tuple[bytes, bytes]]:
    """`characters`: of the prompt as the client wrote it."""
    return [(b"x-compute-type", compute_type.encode()), (b"x-compute-characters", b"%d" % characters)]


def answer_headers(compute_type: str, characters: int, finish: Finish) -> dict[str, str]:
    """Times in whole milliseconds, except x-compute-time (seconds)."""
    times = finish.times
    total = times.finished - times.received
    inference = times.finished - times.admitted
    return {
        "x-compute-type": compute_type,
        "x-compute-time": f"{total:.9f}",
        "x-compute-characters": str(characters),
        "x-total-time": _ms(total),
        "x-validation-time": _ms(times.queued - times.received),
        "x-queue-time": _ms(times.admitted - times.queued),
        "x-inference-time": _ms(inference),
        "x-time-per-token": _ms(inference / max(finish.num_generated, 1)),
        "x-prompt-tokens": str(finish.num_prompt),
        "x-generated-tokens": str(finish.num_generated),
    }


def _ms(seconds: float) -> str:
    return str(floor(seconds * 1000))
