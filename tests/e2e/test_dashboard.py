"""The queries of TGI's Grafana dashboard over /metrics, before, under and after a load whose size is known."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.client import Client
from tests.e2e.servers import LocalRouter, local_server, until
from tests.fakes.promql import Scrape, Window, read_scrape
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

ROWS = 4
ANSWERS = 16  # requests of the load that are answered
REFUSED = 2
TOKENS = 40  # of each answer
SECONDS = 30.0  # what the two scrapes are taken to be apart
PREFILL, DECODE = '{method="prefill"}', '{method="decode"}'
LONG = "the same words again and again " * 15


@dataclass(frozen=True, slots=True)
class Scrapes:
    before: Scrape
    under: Scrape  # while some run and others wait
    after: Scrape

    def at(self, query: str, under_load: bool = False) -> dict[str, float]:
        """Values by their label's, "" where there is none. Prometheus adds `container` to what it scrapes."""
        window = Window(self.before, self.under if under_load else self.after, SECONDS)
        vector = window.evaluate(query)
        assert isinstance(vector, dict)
        return {",".join(value for _, value in sorted(labels)): value for labels, value in vector.items()}

    def one(self, query: str, under_load: bool = False) -> float:
        found = self.at(query, under_load)
        assert list(found) == [""], f"{query}: {found}"
        return found[""]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRouter]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model"), seed=3)
    with local_server(model, max_batch_size=ROWS, max_total_tokens=512) as router:
        yield router


@pytest.fixture(scope="module")
def scrapes(router: LocalRouter) -> Scrapes:
    async def load() -> Scrapes:
        async with Client(router.url) as client:
            before = await scrape(client)
            answers = [
                asyncio.create_task(
                    client.generate(
                        f"{number} " * (number + 1), number % 2 == 0, max_new_tokens=TOKENS, min_tokens=TOKENS
                    )
                )
                for number in range(ANSWERS)
            ]
            await until(lambda: len(router.core.rows) == ROWS and router.core.queue, "a queue")
            under = await scrape(client)
            for answer in await asyncio.gather(*answers):
                assert answer.text
            for _ in range(REFUSED):
                assert await client.status("/generate", {"inputs": "x", "parameters": {"temperature": -1}}) == 422
            return Scrapes(before, under, await scrape(client))

    return router.run(load())


async def scrape(client: Client) -> Scrape:
    return read_scrape(await client.text("/metrics"))


def quantile(which: float, metric: str, labels: str = "") -> str:
    return f"histogram_quantile({which}, sum by (le) (rate({metric}_bucket{labels}[10m])))"


DURATIONS = [  # panels of quantiles, in seconds
    ("Mean Time Per Token quantiles", "tgi_request_mean_time_per_token_duration", ""),
    ("Latency quantiles", "tgi_request_duration", ""),
    ("Queue quantiles", "tgi_request_queue_duration", ""),
    ("Prefill Quantiles", "tgi_batch_inference_duration", PREFILL),
    ("Decode quantiles", "tgi_batch_inference_duration", DECODE),
    ("Forward quantiles", "tgi_batch_forward_duration", DECODE),
    ("Token Decode quantiles", "tgi_batch_decode_duration", DECODE),
    ("Filter Batch quantiles", "tgi_batch_filter_duration", DECODE),
    ("Batch Concat quantiles", "tgi_batch_concat_duration", DECODE),
]


@pytest.mark.row("G: 8 TGI's dashboard shows data")
@pytest.mark.parametrize(
    ("metric", "labels"), [panel[1:] for panel in DURATIONS], ids=[panel[0] for panel in DURATIONS]
)
def test_panels_of_durations(scrapes: Scrapes, metric: str, labels: str) -> None:
    values = [scrapes.one(quantile(which, metric, labels)) for which in (0.5, 0.9, 0.99)]
    assert all(0 < value < 146 for value in values), values
    assert values == sorted(values)
    heat = scrapes.at(f"sum(increase({metric}_bucket{labels}[5m])) by (le)")
    assert len(heat) == 36
    assert heat["+Inf"] == max(heat.values()) > 0
    assert all(math.isfinite(count) for count in heat.values())


@pytest.mark.row("G: 8 TGI's dashboard shows data")
def test_panels_of_the_first_row(scrapes: Scrapes) -> None:
    queue = scrapes.one(f"({quantile(0.5, 'tgi_request_queue_duration')} * 1000) > 0")
    prefill = scrapes.one(f"({quantile(0.5, 'tgi_batch_inference_duration', PREFILL)} * 1000) > 0")
    assert 0 < queue + prefill < 146_000, "time to first token, ms"
    decode = scrapes.one(f"({quantile(0.5, 'tgi_batch_forward_duration', DECODE)} * 1000)>0")
    assert 0 < decode < 146_000, "decode per-token latency, ms"
    tokens = "tgi_request_generated_tokens"
    throughput = scrapes.one(f"sum((rate({tokens}_sum[10m]) / rate({tokens}_count[10m]))>0)")
    assert throughput == pytest.approx(TOKENS), "what the panel calls throughput: tokens per answer"


@pytest.mark.row("G: 8 TGI's dashboard shows data")
def test_panels_of_tokens(scrapes: Scrapes) -> None:
    for which in (0.5, 0.9, 0.99):
        assert 0 < scrapes.one(quantile(which, "tgi_request_input_length")) < 128
        # The bucket that holds TOKENS: they are hundredths of 512.
        assert scrapes.one(quantile(which, "tgi_request_generated_tokens")) == pytest.approx(TOKENS, abs=512 / 100)
        assert scrapes.one(quantile(which, "tgi_request_skipped_tokens")) == 0, "nothing is speculated"


@pytest.mark.row("G: 8 TGI's dashboard shows data")
@pytest.mark.fault("TGI#231")
def test_panels_of_requests(scrapes: Scrapes) -> None:
    assert scrapes.one("sum(increase(tgi_request_success[1m]))") == ANSWERS
    failures = scrapes.at("sum(increase(tgi_request_failure[1m])) by (err)")
    assert failures.pop("validation") == REFUSED
    assert failures == dict.fromkeys(("overloaded", "template", "incomplete", "dropped", "generation"), 0)
    assert scrapes.one("sum(increase(tgi_request_count[1m]))") == ANSWERS + REFUSED
    assert scrapes.one("count(tgi_request_count)") == 1, "replicas"


@pytest.mark.row("G: 8 TGI's dashboard shows data")
@pytest.mark.fault("TGI#2192")
def test_panels_of_the_batch(scrapes: Scrapes) -> None:
    assert 0 < scrapes.one("sum(tgi_queue_size)", under_load=True) <= ANSWERS - ROWS
    assert scrapes.one("avg(tgi_batch_current_size)", under_load=True) == ROWS
    assert scrapes.one("avg(tgi_batch_current_max_tokens)", under_load=True) > 0
    for gauge in ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens"):
        assert scrapes.one(f"sum({gauge})") == 0
    concatenates = scrapes.at("sum(increase(tgi_batch_concat[1m])) by (reason)")
    assert concatenates.keys() == {"chunking", "backpressure", "wait_exceeded"}
    assert sum(concatenates.values()) > 0


@pytest.mark.fault("TGI#2184")
def test_no_series_comes_later(scrapes: Scrapes) -> None:
    for name, series in scrapes.after.items():
        assert series.keys() == scrapes.before[name].keys(), name


def test_what_tgi_does_not_have(scrapes: Scrapes) -> None:
    first, between = "tgi_request_first_token_duration", "tgi_request_inter_token_duration"
    assert scrapes.one(f"increase({first}_count[1m])") == ANSWERS
    assert scrapes.one(f"increase({first}_sum[1m])") < scrapes.one("increase(tgi_request_duration_sum[1m])")
    # Tokens that came together are not apart.
    assert ANSWERS < scrapes.one(f"increase({between}_count[1m])") <= ANSWERS * (TOKENS - 1)
    assert 0 < scrapes.one(quantile(0.5, between)) < 146
    assert scrapes.one("tgi_shard_restarts") == 0
    blocks = scrapes.at("tgi_kv_blocks", under_load=True)
    assert blocks["live"] > 0
    assert sum(blocks.values()) == sum(scrapes.at("tgi_kv_blocks").values())


def test_a_repeated_prompt_hits_until_the_cache_is_flushed(router: LocalRouter, scrapes: Scrapes) -> None:
    async def run() -> None:
        async with Client(router.url) as client:
            hits: list[float] = []
            for flushes in (False, False, True):
                if flushes:
                    cached = await client.metric('tgi_kv_blocks{state="cached"}')
                    status, answer = await client.exchange("/flush_cache", None)
                    assert (status, answer) == (200, {"flushed_blocks": cached, "live_blocks": 0})
                    assert cached > 0
                    assert await client.metric('tgi_kv_blocks{state="cached"}') == 0
                before = await client.metric("tgi_prefix_hit_tokens")
                await client.generate(LONG, max_new_tokens=4)
                hits.append(await client.metric("tgi_prefix_hit_tokens") - before)
            assert hits[0] == hits[2] == 0
            assert hits[1] > 0

    router.run(run())
