"""The reader of dashboards' queries against values worked out by hand, as Prometheus defines them."""

from __future__ import annotations

import math

import pytest

from tests.fakes.promql import Window, read_scrape

BEFORE = """
# TYPE up gauge
up{zone="a"} 1
up{zone="b"} 3
# TYPE took histogram
took_bucket{method="x",le="1"} 2
took_bucket{method="x",le="2"} 2
took_bucket{method="x",le="+Inf"} 2
took_bucket{method="y",le="1"} 0
took_bucket{method="y",le="2"} 0
took_bucket{method="y",le="+Inf"} 0
took_sum{method="x"} 1
took_count{method="x"} 2
took_sum{method="y"} 0
took_count{method="y"} 0
"""
AFTER = """
# TYPE up gauge
up{zone="a"} 2
up{zone="b"} 4
# TYPE took histogram
took_bucket{method="x",le="1"} 6
took_bucket{method="x",le="2"} 10
took_bucket{method="x",le="+Inf"} 12
took_bucket{method="y",le="1"} 0
took_bucket{method="y",le="2"} 0
took_bucket{method="y",le="+Inf"} 0
took_sum{method="x"} 21
took_count{method="x"} 12
took_sum{method="y"} 0
took_count{method="y"} 0
"""
WINDOW = Window(read_scrape(BEFORE), read_scrape(AFTER), 5.0)


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("sum(up)", 6),
        ("avg(up{})", 3),
        ("count(up)", 2),
        ('sum(up{zone="b"})', 4),
        ('sum(rate(took_count{method="x"}[10m]))', 2),
        ("sum(increase(took_count[1m]))", 10),
        ("sum((rate(took_sum[10m]) / rate(took_count[10m])) > 0)", 2),
        # 10 observations: 4 up to 1, 4 more up to 2, 2 above.
        ("histogram_quantile(0.2, sum by (le) (rate(took_bucket[10m])))", 0.5),
        ("histogram_quantile(0.5, sum(rate(took_bucket[10m])) by (le))", 1.25),
        ("histogram_quantile(0.99, sum by (le) (rate(took_bucket[10m])))", 2),
        ("(histogram_quantile(0.5, sum by (le) (rate(took_bucket[10m]))) * 1000) > 0", 1250),
        ("1 + 2 * 3 - 4 / 2", 5),
    ],
)
def test_values(query: str, value: float) -> None:
    found = WINDOW.evaluate(query)
    if isinstance(found, dict):
        (found,) = found.values()
    assert found == pytest.approx(value)


def test_series_keep_the_labels_that_are_asked_for() -> None:
    assert WINDOW.evaluate("sum(increase(took_count[1m])) by (method)") == {
        frozenset({("method", "x")}): 10,
        frozenset({("method", "y")}): 0,
    }
    assert WINDOW.evaluate("up > 2") == {frozenset({("zone", "b")}): 4}


def test_an_empty_histogram_has_no_quantile() -> None:
    found = WINDOW.evaluate('histogram_quantile(0.5, sum by (le) (rate(took_bucket{method="y"}[10m])))')
    assert isinstance(found, dict)
    assert math.isnan(found[frozenset()])


@pytest.mark.parametrize("query", ["sum(up", "up up", "max(up)", "up @ 3"])
def test_what_is_not_understood_is_an_error(query: str) -> None:
    with pytest.raises((ValueError, KeyError, IndexError)):
        WINDOW.evaluate(query)
