"""Every metric of the router in one table, with TGI's names, and the verbs that feed them. Knows no HTTP.

Each series has one meaning, which its help tells. A request is an HTTP request with all its answers (`n`, `best_of`,
several prompts), and is timed when all of them are complete; help that says prompts or answers counts each of those.
All series exist from the start with value 0. Values live in prometheus-client; `exposition.py` writes them out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Buckets(StrEnum):
    """Upper bounds of a histogram."""

    DURATION = "duration"  # 0.0001 × 1.5^k s, k = 1…35
    INPUT = "input"  # hundredths of max_input_tokens
    TOTAL = "total"  # hundredths of max_total_tokens
    BATCH = "batch"  # 1…1024
    SKIPPED = "skipped"  # 0…16


@dataclass(frozen=True, slots=True)
class Definition:
    name: str
    kind: Kind
    unit: str  # of the value; for readers, never part of the name
    help: str
    buckets: Buckets | None = None
    label: str | None = None
    values: tuple[str, ...] = ()  # the label's values that exist from the start


_METHOD = ("prefill", "decode")
_FAILURES = ("overloaded", "validation", "template", "incomplete", "dropped", "generation")
_REASONS = ("chunking", "backpressure", "wait_exceeded")
_BLOCK_STATES = ("live", "cached", "free")


def _counter(name: str, unit: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Definition:
    return Definition(name, Kind.COUNTER, unit, help, None, label, values)


def _gauge(name: str, unit: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Definition:
    return Definition(name, Kind.GAUGE, unit, help, None, label, values)


def _histogram(
    name: str, unit: str, buckets: Buckets, help: str, label: str | None = None, values: tuple[str, ...] = ()
) -> Definition:
    return Definition(name, Kind.HISTOGRAM, unit, help, buckets, label, values)


CATALOGUE: tuple[Definition, ...] = (
    _counter("tgi_request_count", "requests", "HTTP requests that ask for text, each counted once"),
    _counter("tgi_request_success", "requests", "HTTP requests answered completely, each counted once"),
    _counter("tgi_request_failure", "requests", "HTTP requests that failed, by cause", "err", _FAILURES),
    _counter("tgi_batch_inference_count", "steps", "Steps asked of the shard", "method", _METHOD),
    _counter("tgi_batch_inference_success", "steps", "Steps that the shard finished", "method", _METHOD),
    _counter("tgi_batch_inference_failure", "steps", "Steps that the shard failed", "method", _METHOD),
    _counter("tgi_batch_concat", "admissions", "Admissions to a running batch, by reason", "reason", _REASONS),
    _gauge("tgi_queue_size", "requests", "Requests waiting to be admitted"),
    _gauge("tgi_batch_current_size", "requests", "Requests running"),
    _gauge("tgi_batch_current_max_tokens", "tokens", "KV tokens that the running requests hold"),
    _gauge("tgi_batch_max_total_tokens", "tokens", "KV tokens of the whole pool"),
    _gauge("tgi_batch_total_tokens", "tokens", "KV tokens in use, cached prefixes among them"),
    _histogram(
        "tgi_request_duration", "s", Buckets.DURATION, "From a request's arrival to its last answer's last token"
    ),
    _histogram("tgi_request_validation_duration", "s", Buckets.DURATION, "A request's checking and tokenising"),
    _histogram(
        "tgi_request_queue_duration", "s", Buckets.DURATION, "A request's wait until its first answer is admitted"
    ),
    _histogram(
        "tgi_request_inference_duration", "s", Buckets.DURATION, "From a request's first admission to its last token"
    ),
    _histogram("tgi_request_mean_time_per_token_duration", "s", Buckets.DURATION, "Answers: inference time by tokens"),
    _histogram("tgi_request_input_length", "tokens", Buckets.INPUT, "Prompts: tokens, after truncation"),
    _histogram("tgi_request_max_new_tokens", "tokens", Buckets.TOTAL, "Prompts: tokens that an answer may have"),
    _histogram("tgi_request_generated_tokens", "tokens", Buckets.TOTAL, "Answers: tokens"),
    _histogram("tgi_batch_next_size", "requests", Buckets.BATCH, "Requests admitted at once"),
    _histogram(
        "tgi_request_skipped_tokens", "tokens", Buckets.SKIPPED, "Tokens beside the first that a step gives a row"
    ),
    _histogram("tgi_batch_inference_duration", "s", Buckets.DURATION, "A whole step", "method", _METHOD),
    _histogram("tgi_batch_forward_duration", "s", Buckets.DURATION, "Forward part of a step", "method", _METHOD),
    _histogram("tgi_batch_decode_duration", "s", Buckets.DURATION, "Turning results into tokens", "method", _METHOD),
    _histogram("tgi_batch_filter_duration", "s", Buckets.DURATION, "Handing tokens to requests", "method", _METHOD),
    _histogram(
        "tgi_batch_concat_duration",
        "s",
        Buckets.DURATION,
        "Taking requests into a running batch",
        "method",
        ("decode",),
    ),
    # TGI has none of these.
    _histogram(
        "tgi_request_first_token_duration", "s", Buckets.DURATION, "From a request's arrival to its first token"
    ),
    _histogram(
        "tgi_request_inter_token_duration", "s", Buckets.DURATION, "Answers: from one message with tokens to the next"
    ),
    _counter("tgi_prefix_prompt_tokens", "tokens", "Prompts of admitted answers, in tokens"),
    _counter("tgi_prefix_hit_tokens", "tokens", "Of these, found in the prefix cache"),
    _counter("tgi_prefix_evicted_blocks", "blocks", "Cached blocks given up for others"),
    _counter("tgi_prefix_offloaded_blocks", "blocks", "Of these, copied to host memory"),
    _counter("tgi_prefix_returned_blocks", "blocks", "Blocks copied back from host memory for a request"),
    _gauge("tgi_host_blocks", "blocks", "Blocks of host memory that hold evicted prefixes"),
    _gauge(
        "tgi_kv_blocks",
        "blocks",
        "KV blocks: held by running requests, by unused prefixes, by nothing",
        "state",
        _BLOCK_STATES,
    ),
    _counter("tgi_batch_preemptions", "preemptions", "Rows that gave their blocks to others and started again later"),
    _counter("tgi_shard_reconnects", "streams", "Streams to the model server after the first"),
    _counter("tgi_shard_restarts", "streams", "Of these, to one that came back with an empty KV cache"),
    _counter(
        "tgi_shard_suspects",
        "requests",
        "Requests that may have ended the model server: went on, or were found to have done it",
        "outcome",
        ("cleared", "failed"),
    ),
)


class Metrics:
    """The catalogue, alive. Feeding costs about a microsecond: a few times per request or step, never per token."""

    def __init__(self, max_input_tokens: int = 1024, max_total_tokens: int = 2048) -> None:
        """The limits shape the length buckets."""
        self.registry = CollectorRegistry(auto_describe=False)
        self._metrics: dict[str, MetricWrapperBase] = {}
        for definition in CATALOGUE:
            metric = _build(definition, self.registry, max_input_tokens, max_total_tokens)
            self._metrics[definition.name] = metric
            for value in definition.values:
                metric.labels(value)

    def count(self, name: str, label: str | None = None, amount: int = 1) -> None:
        """Add to a counter."""
        metric = self._at(name, label)
        assert isinstance(metric, Counter)
        metric.inc(amount)

    def set(self, name: str, value: float, label: str | None = None) -> None:
        """Set a gauge."""
        metric = self._at(name, label)
        assert isinstance(metric, Gauge)
        metric.set(value)

    def observe(self, name: str, value: float, label: str | None = None, times: int = 1) -> None:
        """Add a value to a histogram, at the same cost however many `times`."""
        metric = self._at(name, label)
        assert isinstance(metric, _Histogram)
        metric.observe_lot(value, times)

    def _at(self, name: str, label: str | None) -> MetricWrapperBase:
        metric = self._metrics[name]
        return metric if label is None else metric.labels(label)


class _Histogram(Histogram):
    """prometheus-client's, which can only add one value at a time."""

    def observe_lot(self, value: float, times: int) -> None:
        self._sum.inc(value * times)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(times)


def bounds(buckets: Buckets, max_input_tokens: int, max_total_tokens: int) -> Iterator[float]:
    """Upper bounds, ascending, without infinity."""
    if buckets is Buckets.DURATION:
        return (0.0001 * 1.5**k for k in range(1, 36))
    if buckets is Buckets.INPUT:
        return (max_input_tokens / 100 * k for k in range(1, 101))
    if buckets is Buckets.TOTAL:
        return (max_total_tokens / 100 * k for k in range(1, 101))
    if buckets is Buckets.BATCH:
        return (float(size) for size in range(1, 1025))
    return (float(count) for count in range(17))


def _build(
    definition: Definition, registry: CollectorRegistry, max_input_tokens: int, max_total_tokens: int
) -> MetricWrapperBase:
    labels = () if definition.label is None else (definition.label,)
    if definition.kind is Kind.COUNTER:
        return Counter(definition.name, definition.help, labels, registry=registry)
    if definition.kind is Kind.GAUGE:
        return Gauge(definition.name, definition.help, labels, registry=registry)
    assert definition.buckets is not None
    upper = tuple(bounds(definition.buckets, max_input_tokens, max_total_tokens))
    return _Histogram(definition.name, definition.help, labels, registry=registry, buckets=upper)
