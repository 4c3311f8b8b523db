"""The part of PromQL that TGI's Grafana dashboard uses, over two scrapes of /metrics.

Between two scrapes `rate` and `increase` are exact: no extrapolation to the window's borders. A vector is a dict from
label sets to values, without the metric's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Scrape = dict[str, Vector]  # by the sample's name

_TOKEN = re.compile(r'\s*(?:(\d+(?:\.\d+)?[mhs]?)|([a-zA-Z_]\w*)|("[^"]*")|([-+*/>(){}\[\],=]))')
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
}


def read_scrape(text: str) -> Scrape:
    """Samples by their names as they stand there, which is what Prometheus keeps.

    prometheus-client's reader would put `_total` behind counters; here it only refuses what is not Prometheus text.
    """
    assert list(text_string_to_metric_families(text))
    scrape: Scrape = {}
    for name, labels, value in _SAMPLE.findall(text):
        scrape.setdefault(name, {})[frozenset(_LABEL.findall(labels))] = float(value)
    return scrape


@dataclass(frozen=True, slots=True)
class Window:
    """Two scrapes, `seconds` apart."""

    before: Scrape
    after: Scrape
    seconds: float

    def evaluate(self, query: str) -> Vector | float:
        """Raises ValueError for what is not understood, KeyError for a metric that does not exist."""
        reader = _Reader(self, [*_tokens(query)])
        value = reader.comparison()
        reader.expect("")
        return value


class _Reader:
    """Recursive descent over the tokens, which evaluates on its way."""

    def __init__(self, window: Window, tokens: list[str]) -> None:
        self._window = window
        self._tokens = tokens

    # -- operators -----------------------------------------------------------------------------------------------------

    def comparison(self) -> Vector | float:
        left = self._sum()
        if self._take(">"):
            right = self._sum()
            assert isinstance(left, dict), "a comparison filters a vector"
            assert isinstance(right, float), "by a number"
            return {labels: value for labels, value in left.items() if value > right}
        return left

    def _sum(self) -> Vector | float:
        left = self._product()
        while (operator := self._peek()) in ("+", "-"):
            self.expect(operator)
            left = _combine(operator, left, self._product())
        return left

    def _product(self) -> Vector | float:
        left = self._term()
        while (operator := self._peek()) in ("*", "/"):
            self.expect(operator)
            left = _combine(operator, left, self._term())
        return left

    # -- terms ---------------------------------------------------------------------------------------------------------

    def _term(self) -> Vector | float:
        token = self._next()
        if token == "(":
            value = self.comparison()
            self.expect(")")
            return value
        if token[:1].isdigit():
            return float(token)
        if token in _AGGREGATES:
            return self._aggregate(_AGGREGATES[token])
        if token in ("rate", "increase"):
            self.expect("(")
            grown = self._increase(self._next())
            self.expect(")")
            seconds = self._window.seconds if token == "rate" else 1.0
            return {labels: value / seconds for labels, value in grown.items()}
        if token == "histogram_quantile":
            self.expect("(")
            quantile = float(self._next())
            self.expect(",")
            buckets = self.comparison()
            self.expect(")")
            assert isinstance(buckets, dict)
            return _quantiles(quantile, buckets)
        return _select(self._window.after[token], self._matchers())

    def _aggregate(self, function: Callable[[list[float]], float]) -> Vector:
        by = self._by()
        self.expect("(")
        vector = self.comparison()
        self.expect(")")
        by = by or self._by()
        assert isinstance(vector, dict)
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in by), []).append(value)
        return {labels: function(values) for labels, values in groups.items()}

    def _by(self) -> set[str]:
        if not self._take("by"):
            return set()
        self.expect("(")
        names = {self._next()}
        while self._take(","):
            names.add(self._next())
        self.expect(")")
        return names

    def _increase(self, name: str) -> Vector:
        wanted = self._matchers()
        self.expect("[")
        self._next()  # how far back is what the two scrapes say
        self.expect("]")
        before, after = (_select(scrape[name], wanted) for scrape in (self._window.before, self._window.after))
        assert after.keys() == before.keys(), f"{name}: series come or go"
        return {labels: value - before[labels] for labels, value in after.items()}

    def _matchers(self) -> Labels:
        wanted: set[tuple[str, str]] = set()
        if self._take("{"):
            while not self._take("}"):
                label = self._next()
                self.expect("=")
                wanted.add((label, self._next().strip('"')))
                self._take(",")
        return frozenset(wanted)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _next(self) -> str:
        return self._tokens.pop(0)

    def _take(self, token: str) -> bool:
        found = self._peek() == token
        if found:
            self._next()
        return found

    def expect(self, token: str) -> None:
        if self._peek() != token:
            raise ValueError(f"expected {token!r} before {self._tokens}")
        if token:
            self._next()


def _tokens(query: str) -> Iterator[str]:
    position = 0
    while position < len(query.rstrip()):
        match = _TOKEN.match(query, position)
        if match is None:
            raise ValueError(f"not understood: {query[position:]!r}")
        yield match[0].strip()
        position = match.end()


def _select(vector: Vector, wanted: Labels) -> Vector:
    return {labels: value for labels, value in vector.items() if wanted <= labels}


def _combine(operator: str, left: Vector | float, right: Vector | float) -> Vector | float:
    """Two vectors meet where their labels are equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {labels: _apply(operator, left[labels], right[labels]) for labels in left.keys() & right.keys()}
    if isinstance(left, dict):
        assert isinstance(right, float)
        return {labels: _apply(operator, value, right) for labels, value in left.items()}
    if isinstance(right, dict):
        return {labels: _apply(operator, left, value) for labels, value in right.items()}
    return _apply(operator, left, right)


def _apply(operator: str, left: float, right: float) -> float:
    if operator == "/":
        return left / right if right else math.nan
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    """Of each histogram among the `buckets`, by its labels other than `le`."""
    histograms: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        rest = frozenset(pair for pair in labels if pair[0] != "le")
        histograms.setdefault(rest, []).append((bound, count))
    return {labels: _quantile(quantile, sorted(found)) for labels, found in histograms.items()}


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    """Linear within a bucket, and no higher than the last finite bound, as Prometheus does it."""
    assert buckets[-1][0] == math.inf, "the last bucket holds all"
    rank = quantile * buckets[-1][1]
    if not buckets[-1][1]:
        return math.nan
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == math.inf:
                return low
            return bound if bound <= 0 else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError("counts of buckets do not rise")
