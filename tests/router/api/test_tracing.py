from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.app import App, read_until, serving
from tests.fakes.backend import ScriptedBackend
from tests.fakes.collector import SERVER, Collector, SeenSpan, names
from tgi.errors import GenerationFailed
from tgi.observability import otlp
from tgi.router.app import table

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(otlp, "BATCH_S", 0.01)
    with Collector() as collector:
        yield collector


@pytest.fixture
def app(collector: Collector) -> Iterator[App]:
    with serving(otlp_endpoint=collector.endpoint, rows=table(kserve_routes=True)) as app:
        yield app


def root_of(collector: Collector, name: str) -> SeenSpan:
    span = collector.named(name)
    assert (span.service, span.kind) == ("test-router", SERVER)
    return span


@pytest.mark.row("F: OTLP traces, traceparent")
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/", {"inputs": "x"}, "compat_generate"),
        ("/generate", {"inputs": "x"}, "generate"),
        ("/generate_stream", {"inputs": "x"}, "generate_stream"),
        ("/v1/chat/completions", CHAT, "chat_completions"),
        ("/v1/chat/completions", CHAT | {"stream": True}, "chat_completions"),
        ("/v1/completions", {"prompt": "x"}, "completions"),
        ("/v1/responses", {"input": "x"}, "responses"),
        ("/v1/messages", CHAT | {"max_tokens": 5}, "messages"),
        ("/invocations", {"inputs": "x"}, "sagemaker_compatibility"),
        ("/vertex", {"instances": [{"inputs": "x"}]}, "vertex_compatibility"),
        (
            "/v2/models/m/infer",
            {
                "inputs": [{"name": "p", "shape": [1], "datatype": "BYTES", "data": ["x"]}],
                "outputs": [{"name": "text"}],
            },
            "kserve_infer",
        ),
    ],
)
def test_a_request_is_a_span_with_its_parts(
    app: App, collector: Collector, path: str, body: dict[str, Any], name: str
) -> None:
    assert app.post(path, body, CALLER).status == 200
    root = root_of(collector, name)
    assert (root.trace_id, root.parent_id, root.is_error) == (TRACE_ID, CALLER_ID, False)
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["time_per_token"] == f"{1000 * 8 / 64 / 3:.3f}ms"
    assert root.attributes["total_time"] == f"{1000 * 11 / 64:.3f}ms"
    assert {"validation_time", "queue_time", "inference_time", "seed", "parameters"} <= set(root.attributes)
    parts = collector.children(root)
    assert set(parts) == {"validate", "queued", "infer"}
    infer = parts["infer"]
    steps = collector.children(infer)
    assert set(steps) == {"prefill", "decode"}
    assert abs(parts["queued"].end - infer.start) < 1000
    assert infer.start == steps["prefill"].start
    assert steps["prefill"].end == steps["decode"].start
    assert steps["decode"].end == infer.end
    assert abs(infer.end - infer.start - 10**9 * 8 // 64) < 1000
    # Who works for the request is told of the request's span.
    assert app.backend.requests[-1].traceparent == f"{root.ids}-01"


def test_what_was_asked_for(app: App, collector: Collector) -> None:
    parameters = {"temperature": 0.5, "seed": (1 << 64) - 1, "max_new_tokens": 7, "stop": ["§"]}
    assert app.post("/generate", {"inputs": "secret words", "parameters": parameters}).status == 200
    root = root_of(collector, "generate")
    assert json.loads(root.attributes["parameters"]) == parameters
    assert root.attributes["seed"] == f"Some({(1 << 64) - 1})"
    assert root.attributes["http.route"] == "/generate"
    assert root.parent_id == ""
    assert "secret" not in str(collector.spans)


def test_a_greedy_answer_has_no_seed(app: App, collector: Collector) -> None:
    assert app.post("/generate", {"inputs": "x", "parameters": {}}).status == 200
    assert root_of(collector, "generate").attributes["seed"] == "None"


def test_long_parameters_are_cut(app: App, collector: Collector) -> None:
    grammar = {"type": "json", "value": {"type": "object", "description": "d" * 9000}}
    assert app.post("/generate", {"inputs": "x", "parameters": {"grammar": grammar}}).status == 200
    assert len(root_of(collector, "generate").attributes["parameters"]) == 4096


def test_each_of_several_answers_has_its_parts(app: App, collector: Collector) -> None:
    assert app.post("/v1/chat/completions", CHAT | {"n": 3, "temperature": 1.0}, CALLER).status == 200
    root = root_of(collector, "chat_completions")
    parts = [span for span in collector.spans if span.parent_id == root.span_id]
    assert sorted(names(parts)) == sorted(["validate", *["queued", "infer"] * 3])
    assert {request.traceparent for request in app.backend.requests} == {f"{root.ids}-01"}


def test_a_request_that_runs_nothing_is_a_span_alone(app: App, collector: Collector) -> None:
    assert app.post("/tokenize", {"inputs": "x"}, CALLER).status == 200
    root = root_of(collector, "tokenize")
    assert (root.parent_id, collector.children(root)) == (CALLER_ID, {})


def test_a_refusal(app: App, collector: Collector) -> None:
    assert app.post("/generate", {"inputs": ""}, CALLER).status == 422
    root = root_of(collector, "generate")
    assert (root.is_error, root.message, root.parent_id) == (True, "`inputs` cannot be empty", CALLER_ID)
    assert root.attributes["http.response.status_code"] == 422
    assert root.attributes["error.type"] == "validation"


def test_a_body_that_cannot_be_read(app: App, collector: Collector) -> None:
    assert app.post("/generate", raw=b"{").status >= 400
    root = root_of(collector, "generate")
    assert root.is_error
    assert root.message.startswith("HTTP 4")


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_failure_after_some_tokens(collector: Collector, path: str) -> None:
    with serving(ScriptedBackend(None), otlp_endpoint=collector.endpoint) as app:
        client = app.open(path, {"inputs": "x"})
        playing = app.backend.next_playing()
        playing.say("a")
        playing.fail(GenerationFailed("out of luck"))
        assert b"out of luck" in read_until(client, b"generation")
    root = root_of(collector, path[1:])
    assert (root.is_error, root.message, root.attributes["error.type"]) == (True, "out of luck", "generation")
    assert set(collector.children(root)) == {"validate"}


def test_a_client_that_leaves(collector: Collector) -> None:
    with serving(ScriptedBackend(None), otlp_endpoint=collector.endpoint) as app:
        client = app.open("/generate_stream", {"inputs": "x"})
        playing = app.backend.next_playing()
        client.close()
        assert playing.cancelled.wait(20)
        root = root_of(collector, "generate_stream")
    assert (root.is_error, root.message, root.attributes["error.type"]) == (True, "the client has gone", "dropped")


def test_who_has_no_key_makes_no_span(collector: Collector) -> None:
    with serving(otlp_endpoint=collector.endpoint, api_key="sesame-open") as app:
        assert app.post("/generate", {"inputs": "x"}).status == 401
        assert app.get("/health").status == 200
        assert app.post("/generate", {"inputs": "x"}, {"authorization": "Bearer sesame-open"}).status == 200
    assert names([span for span in collector.spans if not span.parent_id]) == ["generate"]


def test_requests_at_once_do_not_mix(collector: Collector) -> None:
    with serving(ScriptedBackend(None), otlp_endpoint=collector.endpoint) as app:
        clients = [app.open("/generate", {"inputs": "x", "parameters": {"max_new_tokens": n}}) for n in (1, 2)]
        playings = [app.backend.next_playing() for _ in clients]
        for playing in playings:
            playing.fail(GenerationFailed(str(playing.request.stopping.max_new_tokens)))
        for client in clients:
            read_until(client, b"generation")
        given = [(p.request.stopping.max_new_tokens, p.request.traceparent[:-3]) for p in playings]
    told = {
        (json.loads(span.attributes["parameters"])["max_new_tokens"], span.message, span.ids)
        for span in collector.spans
        if span.name == "generate"
    }
    assert told == {(number, str(number), ids) for number, ids in given}
