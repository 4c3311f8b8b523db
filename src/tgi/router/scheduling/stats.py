"""What the scheduler tells about itself: plain numbers to read, and a function to be told of each observation.

Knows TGI's metric names as words, and nothing of how they are exposed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Method = Literal["prefill", "decode"]
Observe = Callable[[str, float, str | None], None]  # (metric name, value, `method` label where the metric has one)


def _ignore(name: str, value: float, method: str | None) -> None:
    pass


@dataclass(slots=True)
class SchedulerStats:
    # gauges
    queue_size: int = 0  # tgi_queue_size
    batch_current_size: int = 0  # tgi_batch_current_size
    batch_current_max_tokens: int = 0  # tgi_batch_current_max_tokens: tokens that the rows' blocks can hold
    blocks_free: int = 0
    blocks_cached: int = 0  # hold prefixes that nobody uses now
    rows_waiting: int = 0  # for blocks
    # counters
    inference_count: Counter[Method] = field(default_factory=Counter)  # tgi_batch_inference_count, engine steps
    inference_success: Counter[Method] = field(default_factory=Counter)  # tgi_batch_inference_success
    inference_failure: Counter[Method] = field(default_factory=Counter)  # tgi_batch_inference_failure
    concat: Counter[str] = field(default_factory=Counter)  # tgi_batch_concat, by reason
    dropped: int = 0  # entries cancelled before their end
    preemptions: int = 0
    prompt_tokens: int = 0  # of admitted prompts
    cached_tokens: int = 0  # of these, found in the prefix tree
    generated_tokens: int = 0
    # observations: tgi_batch_next_size; tgi_batch_{inference,forward,decode,filter}_duration with their method;
    # tgi_request_skipped_tokens. What concerns one request alone is observed by infer.py, at its end.
    observe: Observe = _ignore
