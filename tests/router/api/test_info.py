from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.app import App, serving
from tests.fakes.backend import ScriptedBackend
from tests.fakes.tokenizer import BOS_ID, EOS_ID
from tgi.observability.metrics import Metrics
from tgi.router.api.metrics import follow
from tgi.router.api.tokenize import LONG_TEXT
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
    stats.queue_size, stats.batch_current_size, stats.batch_current_max_tokens, stats.blocks_free = 3, 2, 64, 6
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
    stats.observe("tgi_batch_forward_duration", 0.25, "prefill")
    assert value("tgi_batch_forward_duration_sum", method="prefill") == 0.25
