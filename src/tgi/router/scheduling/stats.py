"""What the scheduler tells about itself: plain numbers to read, and a function to be told of each observation.

Knows TGI's metric names as words, and nothing of how they are exposed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, Protocol

Method = Literal["prefill", "decode"]


class Observe(Protocol):
    def __call__(self, name: str, value: float, label: str | None, times: int = 1, /) -> None:
        """Of the metric `name`, with the `method` as label where it has one, `value` was seen `times`."""


def _ignore(name: str, value: float, label: str | None, times: int = 1, /) -> None:
    pass


@dataclass(slots=True)
class SchedulerStats:
    # gauges
    queue_size: int = 0  # tgi_queue_size
    batch_current_size: int = 0  # tgi_batch_current_size
    batch_current_max_tokens: int = 0  # tgi_batch_current_max_tokens: tokens that the rows' blocks can hold
    blocks_live: int = 0  # tgi_kv_blocks: used by rows
    blocks_cached: int = 0  # hold prefixes that nobody uses now
    blocks_free: int = 0
    blocks_host: int = 0  # tgi_host_blocks: of the host that hold evicted prefixes
    rows_waiting: int = 0  # for blocks
    # counters
    inference_count: Counter[Method] = field(default_factory=Counter)  # tgi_batch_inference_count, engine steps
    inference_success: Counter[Method] = field(default_factory=Counter)  # tgi_batch_inference_success
    inference_failure: Counter[Method] = field(default_factory=Counter)  # tgi_batch_inference_failure
    concat: Counter[str] = field(default_factory=Counter)  # tgi_batch_concat, by reason
    dropped: int = 0  # entries cancelled before their end
    preemptions: int = 0  # tgi_batch_preemptions
    prompt_tokens: int = 0  # tgi_prefix_prompt_tokens: of admitted prompts
    cached_tokens: int = 0  # tgi_prefix_hit_tokens: of these, found in the prefix tree
    evicted_blocks: int = 0  # tgi_prefix_evicted_blocks
    offloaded_blocks: int = 0  # tgi_prefix_offloaded_blocks: of these, kept on the host
    returned_blocks: int = 0  # tgi_prefix_returned_blocks: brought back from there
    generated_tokens: int = 0
    reconnects: int = 0  # tgi_shard_reconnects: streams after the first
    restarts: int = 0  # tgi_shard_restarts: of these, with another KV cache
    suspects_cleared: int = 0  # tgi_shard_suspects, by what came of it
    suspects_failed: int = 0
    # observations: tgi_batch_next_size; tgi_batch_{inference,forward,decode,filter}_duration with their method;
    # tgi_batch_concat_duration; in lots tgi_request_skipped_tokens and tgi_request_inter_token_duration. What concerns
    # one request alone is observed by infer.py, at its end.
    observe: Observe = _ignore
