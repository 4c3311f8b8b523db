"""Response headers of the generation routes."""

from __future__ import annotations

from math import floor

from tgi.router.backend import Finish


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
