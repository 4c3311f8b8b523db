from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from tests.fakes.app import App, serving
from tests.fakes.backend import ScriptedBackend
from tests.fakes.tokenizer import BOS_ID, EOS_ID
from tgi.observability.exposition import render
from tgi.observability.metrics import Metrics
from tgi.router.api.metrics import follow
from tgi.router.api.tokenize import LONG_TEXT
from tgi.router.backend import Flushed
from tgi.router.scheduling.stats import SchedulerStats


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(ScriptedBackend(None)) as app:
        yield app


@pytest.mark.row("B: /info, /health, /ping, GET /")
@pytest.mark.fault("sglang#3695", "sglang#22511")
def test_health_is_what_the_backend_says_and_runs_nothing(app: App) -> None:
    for healthy, status, body in (
        (True, 200, b""),
        (False, 503, b'{"error":"unhealthy","error_type":"healthcheck"}'),
        (True, 200, b""),
    ):
        app.backend.healthy = healthy
        for path in ("/health", "/ping", "/"):
            answer = app.get(path)
            assert (answer.status, answer.body) == (status, body)
    assert app.backend.playing == []


@pytest.mark.row("B: /tokenize")
@pytest.mark.parametrize(
    ("text", "slices"),
    [
        ("", []),
        ("ab", [(97, "a", 0, 1), (98, "b", 1, 2)]),
        ("é!", [(195, "é", 0, 2), (169, "é", 0, 2), (33, "!", 2, 3)]),
        ("<s>a</s>", [(BOS_ID, "<s>", 0, 3), (97, "a", 3, 4), (EOS_ID, "</s>", 4, 8)]),
        ("😀</s>", [*[(byte, "😀", 0, 4) for byte in "😀".encode()], (EOS_ID, "</s>", 4, 8)]),
    ],
)
def test_tokenize_places_tokens_in_the_bytes(app: App, text: str, slices: list[tuple[int, str, int, int]]) -> None:
    answer = app.post("/tokenize", {"inputs": text, "parameters": {"truncate": 1}})
    assert answer.status == 200
    assert answer.json == [{"id": i, "text": t, "start": a, "stop": b} for i, t, a, b in slices]


@pytest.mark.parametrize("pairs", [1000, LONG_TEXT])
def test_tokenize_of_a_long_text(pairs: int) -> None:
    text = "aé" * pairs
    with serving(ScriptedBackend(None), payload_limit=1 << 20) as app:
        entries = app.post("/tokenize", {"inputs": text}).json
    assert [entry["id"] for entry in entries] == list(text.encode())
    assert entries[-1] == {"id": 169, "text": "é", "start": 3 * pairs - 2, "stop": 3 * pairs}


def test_tokenize_needs_no_permit(app: App) -> None:
    with serving(ScriptedBackend(None), max_concurrent_requests=1) as small:
        small.open("/generate", {"inputs": "x"})
        small.backend.next_playing()
        assert small.post("/generate", {"inputs": "x"}).status == 429
        assert small.post("/tokenize", {"inputs": "x"}).status == 200


def test_an_operator_empties_the_cache(app: App) -> None:
    app.backend.flushed = Flushed(flushed=12, live=3)
    for body in (None, {}):
        answer = app.post("/flush_cache", body)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.body == b'{"flushed_blocks":12,"live_blocks":3}'
    assert app.get("/flush_cache").status == 405


def test_who_has_no_key_does_not() -> None:
    with serving(ScriptedBackend(None), api_key="secret") as guarded:
        assert guarded.post("/flush_cache").status == 401
        assert guarded.post("/flush_cache", headers={"authorization": "Bearer secret"}).status == 200


def test_metrics_are_written_beside_the_event_loop(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def render_here(registry: CollectorRegistry) -> bytes:
        threads.append(threading.current_thread())
        return render(registry)

    monkeypatch.setattr("tgi.router.api.metrics.render", render_here)
    assert app.get("/metrics").status == 200
    assert threads
    assert app.thread not in threads


@pytest.mark.row("B: /metrics")
@pytest.mark.fault("TGI#2184")
def test_metrics_before_any_request(app: App) -> None:
    answer = app.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    lines = answer.body.decode().splitlines()
    assert "tgi_request_count 0.0" in lines
    assert "tgi_queue_size 0.0" in lines


@pytest.mark.fault("TGI#2192")
def test_the_schedulers_numbers_are_read_at_each_scrape() -> None:
    metrics, stats = Metrics(), SchedulerStats()
    refresh = follow(stats, metrics, block_size=16, num_blocks=11)

    def value(name: str, **labels: str) -> float | None:
        refresh()
        return metrics.registry.get_sample_value(name, labels)

    assert value("tgi_batch_max_total_tokens") == 160
    assert value("tgi_batch_total_tokens") == 0
    stats.queue_size, stats.batch_current_size, stats.batch_current_max_tokens = 3, 2, 64
    stats.blocks_live, stats.blocks_cached, stats.blocks_free = 1, 3, 6
    assert value("tgi_queue_size") == 3
    assert value("tgi_batch_current_size") == 2
    assert value("tgi_batch_current_max_tokens") == 64
    assert value("tgi_batch_total_tokens") == 64
    stats.queue_size = 0
    assert value("tgi_queue_size") == 0
    stats.inference_count["decode"] += 5
    stats.concat["chunking"] += 2
    assert value("tgi_batch_inference_count_total", method="decode") == 5
    assert value("tgi_batch_inference_count_total", method="decode") == 5, "counted again by a second scrape"
    stats.inference_count["decode"] += 1
    assert value("tgi_batch_inference_count_total", method="decode") == 6
    assert value("tgi_batch_concat_total", reason="chunking") == 2
    assert value("tgi_batch_max_total_tokens") == 160
    assert [value("tgi_kv_blocks", state=state) for state in ("live", "cached", "free")] == [1, 3, 6]
    stats.prompt_tokens, stats.cached_tokens, stats.evicted_blocks = 100, 30, 4
    stats.preemptions, stats.reconnects, stats.restarts = 5, 7, 6
    for _ in range(2):
        assert value("tgi_prefix_prompt_tokens_total") == 100
        assert value("tgi_prefix_hit_tokens_total") == 30
        assert value("tgi_prefix_evicted_blocks_total") == 4
        assert value("tgi_batch_preemptions_total") == 5
        assert value("tgi_shard_reconnects_total") == 7
        assert value("tgi_shard_restarts_total") == 6
    stats.observe("tgi_batch_forward_duration", 0.25, "prefill")
    assert value("tgi_batch_forward_duration_sum", method="prefill") == 0.25
