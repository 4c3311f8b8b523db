from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tgi.observability.exposition import render
from tgi.observability.metrics import CATALOGUE, Buckets, Kind, Metrics, bounds

OURS = {
    "tgi_request_first_token_duration": ("histogram", None),
    "tgi_request_inter_token_duration": ("histogram", None),
    "tgi_prefix_prompt_tokens": ("counter", None),
    "tgi_prefix_hit_tokens": ("counter", None),
    "tgi_prefix_evicted_blocks": ("counter", None),
    "tgi_prefix_offloaded_blocks": ("counter", None),
    "tgi_prefix_returned_blocks": ("counter", None),
    "tgi_host_blocks": ("gauge", None),
    "tgi_kv_blocks": ("gauge", "state"),
    "tgi_batch_preemptions": ("counter", None),
    "tgi_shard_reconnects": ("counter", None),
    "tgi_shard_restarts": ("counter", None),
    "tgi_shard_suspects": ("counter", "outcome"),
}
# Of TGI: name -> (kind, label). tgi_request_skipped_tokens is a summary there.
TGIS = {
    "tgi_request_count": ("counter", None),
    "tgi_request_success": ("counter", None),
    "tgi_request_failure": ("counter", "err"),
    "tgi_batch_inference_count": ("counter", "method"),
    "tgi_batch_inference_success": ("counter", "method"),
    "tgi_batch_inference_failure": ("counter", "method"),
    "tgi_batch_concat": ("counter", "reason"),
    "tgi_queue_size": ("gauge", None),
    "tgi_batch_current_size": ("gauge", None),
    "tgi_batch_current_max_tokens": ("gauge", None),
    "tgi_batch_max_total_tokens": ("gauge", None),
    "tgi_batch_total_tokens": ("gauge", None),
    "tgi_request_duration": ("histogram", None),
    "tgi_request_validation_duration": ("histogram", None),
    "tgi_request_queue_duration": ("histogram", None),
    "tgi_request_inference_duration": ("histogram", None),
    "tgi_request_mean_time_per_token_duration": ("histogram", None),
    "tgi_request_input_length": ("histogram", None),
    "tgi_request_max_new_tokens": ("histogram", None),
    "tgi_request_generated_tokens": ("histogram", None),
    "tgi_batch_next_size": ("histogram", None),
    "tgi_request_skipped_tokens": ("histogram", None),
    "tgi_batch_inference_duration": ("histogram", "method"),
    "tgi_batch_forward_duration": ("histogram", "method"),
    "tgi_batch_decode_duration": ("histogram", "method"),
    "tgi_batch_filter_duration": ("histogram", "method"),
    "tgi_batch_concat_duration": ("histogram", "method"),
}
ALL = TGIS | OURS
VALUES = {
    "outcome": {"cleared", "failed"},
    "err": {"overloaded", "validation", "template", "incomplete", "dropped", "generation"},
    "method": {"prefill", "decode"},
    "state": {"live", "cached", "free"},
    "reason": {"chunking", "backpressure", "wait_exceeded"},
}


def series(text: str) -> dict[str, float]:
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }


@pytest.mark.row("F: Prometheus names, labels, buckets")
@pytest.mark.fault("TGI#231")
def test_the_catalogue_is_tgis_with_units_and_help() -> None:
    assert {entry.name: (entry.kind.value, entry.label) for entry in CATALOGUE} == ALL
    for entry in CATALOGUE:
        assert entry.unit
        assert entry.help
        expected = {"decode"} if entry.name == "tgi_batch_concat_duration" else VALUES.get(entry.label or "", set())
        assert set(entry.values) == expected
        if entry.kind is Kind.HISTOGRAM and entry.name.endswith("duration"):
            assert (entry.buckets, entry.unit) == (Buckets.DURATION, "s")


@pytest.mark.fault("TGI#2184")
def test_every_series_is_there_from_the_start_with_value_zero() -> None:
    found = series(render(Metrics().registry).decode())
    assert set(found.values()) == {0.0}
    for entry in CATALOGUE:
        suffixes = ("_sum", "_count") if entry.kind is Kind.HISTOGRAM else ("",)
        labels = [f'{{{entry.label}="{value}"}}' for value in entry.values] or [""]
        for suffix in suffixes:
            for label in labels:
                assert f"{entry.name}{suffix}{label}" in found


def test_names_are_exact_and_nothing_else_is_exposed() -> None:
    text = render(Metrics().registry).decode()
    assert "_total{" not in text
    assert "_created" not in text
    assert not re.search(r"^tgi_request_count_total", text, re.MULTILINE)
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")} == set(ALL)


def test_the_text_is_what_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.count("tgi_request_count", amount=3)
    metrics.count("tgi_request_failure", "dropped")
    metrics.set("tgi_queue_size", 7)
    metrics.observe("tgi_batch_inference_duration", 0.0002, "decode")
    text = render(metrics.registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {name: kind for name, (kind, _) in ALL.items()}
    assert families["tgi_request_count"].samples[0].value == 3
    assert families["tgi_queue_size"].samples[0].value == 7
    buckets = {
        sample.labels["le"]: sample.value
        for sample in families["tgi_batch_inference_duration"].samples
        if sample.name.endswith("_bucket") and sample.labels["method"] == "decode"
    }
    assert buckets["+Inf"] == 1
    assert min(float(le) for le, value in buckets.items() if value) == pytest.approx(0.000225)


def test_many_equal_values_at_once() -> None:
    one_by_one, at_once = Metrics(), Metrics()
    bound = next(bounds(Buckets.DURATION, 1024, 2048))
    for value, times in ((0.0, 3), (bound, 2), (0.3, 5), (1000.0, 2), (0.2, 0)):
        at_once.observe("tgi_batch_forward_duration", value, "decode", times)
        for _ in range(times):
            one_by_one.observe("tgi_batch_forward_duration", value, "decode")
    first, second = (series(render(metrics.registry).decode()) for metrics in (one_by_one, at_once))
    assert first == pytest.approx(second)
    assert second[f'tgi_batch_forward_duration_bucket{{method="decode",le="{bound!r}"}}'] == 5, (
        "a bound is in its bucket"
    )
    assert second['tgi_batch_forward_duration_count{method="decode"}'] == 12


@pytest.mark.parametrize(
    ("buckets", "count", "first", "last"),
    [
        (Buckets.DURATION, 35, 0.00015, 145.6),
        (Buckets.INPUT, 100, 10.24, 1024),
        (Buckets.TOTAL, 100, 20.48, 2048),
        (Buckets.BATCH, 1024, 1, 1024),
        (Buckets.SKIPPED, 17, 0, 16),
    ],
)
def test_buckets(buckets: Buckets, count: int, first: float, last: float) -> None:
    values = list(bounds(buckets, 1024, 2048))
    assert len(values) == count
    assert values == sorted(values)
    assert values[0] == pytest.approx(first)
    assert values[-1] == pytest.approx(last, rel=1e-3)
