from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.fakes.app import App, serving
from tests.fakes.backend import EOS, HELLO, Said, Script, ScriptedBackend
from tgi.enums import FinishReason
from tgi.errors import GenerationFailed, InvalidRequest, Overloaded, Unavailable
from tgi.router.backend import PromptToken, TopToken


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.fixture(autouse=True)
def hello(app: App) -> None:
    app.backend.script = HELLO
    app.backend.refusal = None


TOP = (TopToken(7, "a", -0.34000000357627869, False), TopToken(8, "b", float("-inf"), False))


@pytest.mark.row("A: POST /generate_stream", "A: POST /generate")
def test_the_exact_bytes_of_a_stream(app: App) -> None:
    app.backend.script = Script(
        (Said('q"\n', 5, logprob=-0.34000000357627869), Said("é", 6, logprob=float("nan"), top=TOP), EOS)
    )
    answer = app.post("/generate_stream", {"inputs": "x"})
    assert answer.body.decode() == (
        'data: {"index":1,"token":{"id":5,"text":"q\\"\\n","logprob":-0.34,"special":false},'
        '"generated_text":null,"details":null}\n\n'
        'data: {"index":2,"token":{"id":6,"text":"é","logprob":null,"special":false},'
        '"top_tokens":[{"id":7,"text":"a","logprob":-0.34,"special":false},'
        '{"id":8,"text":"b","logprob":null,"special":false}],'
        '"generated_text":null,"details":null}\n\n'
        'data: {"index":3,"token":{"id":257,"text":"</s>","logprob":-0.5,"special":true},'
        '"generated_text":"q\\"\\né","details":null}\n\n'
    )


def test_streamed_and_plain_are_the_same(app: App) -> None:
    app.backend.script = Script([Said(text) for text in ("a", "", "日本", " 😀", "")] + [EOS])
    plain = app.post("/generate", {"inputs": "x", "parameters": {"details": True}}).json
    events = [json.loads(event) for event in app.post("/generate_stream", {"inputs": "x"}).events]
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == "a日本 😀"
    assert events[-1]["generated_text"] == plain["generated_text"] == "a日本 😀"
    assert [event["token"] for event in events] == plain["details"]["tokens"]
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5, 6]


@pytest.mark.fault("TGI#2466")
@pytest.mark.row("A: details, decoder_input_details", "A: top_n_tokens")
def test_details_of_an_answer_at_its_length(app: App) -> None:
    app.backend.script = Script((Said("a", top=TOP), Said("b")), FinishReason.LENGTH)
    answer = app.post("/generate", {"inputs": "x", "parameters": {"details": True, "top_n_tokens": 2}})
    assert answer.json == {
        "generated_text": "ab",
        "details": {
            "finish_reason": "length",
            "generated_tokens": 2,
            "seed": None,
            "prefill": [],
            "tokens": [
                {"id": 7, "text": "a", "logprob": -0.25, "special": False},
                {"id": 7, "text": "b", "logprob": -0.25, "special": False},
            ],
            "top_tokens": [
                [
                    {"id": 7, "text": "a", "logprob": -0.34, "special": False},
                    {"id": 8, "text": "b", "logprob": None, "special": False},
                ],
                [],
            ],
        },
    }
    assert app.backend.requests[-1].top_n == 2


def test_prompt_details_where_the_backend_gives_them(app: App) -> None:
    prompt = [PromptToken(1, "x", None), PromptToken(2, "y", -0.34000000357627869)]
    app.backend.script = Script((EOS,), prompt=prompt)
    details = app.post("/generate", {"inputs": "xy", "parameters": {"details": True}}).json["details"]
    assert details["prefill"] == [
        {"id": 1, "text": "x", "logprob": None},
        {"id": 2, "text": "y", "logprob": -0.34},
    ]


@pytest.mark.fault("lmdeploy#3131")
@pytest.mark.row("A: stop")
@pytest.mark.parametrize("stop", ["END", 42])
def test_the_details_name_what_stopped_the_answer(app: App, stop: str | int) -> None:
    app.backend.script = Script((Said("a END"),), FinishReason.STOP_SEQUENCE, stop=stop)
    body = {"inputs": "x", "parameters": {"details": True, "stop": ["END"]}}
    details = app.post("/generate", body).json["details"]
    assert (details["finish_reason"], details["stop_reason"]) == ("stop_sequence", stop)
    last = json.loads(app.post("/generate_stream", body).events[-1])
    assert (last["details"]["finish_reason"], last["details"]["stop_reason"]) == ("stop_sequence", stop)
    assert app.backend.requests[-1].stopping.stop_strings == ("END",)
    assert app.backend.requests[-1].stopping.include_stop


@pytest.mark.row("A: POST / (list answer, stream switch)", "A: return_full_text")
@pytest.mark.parametrize(("path", "default"), [("/", True), ("/generate", False)])
def test_the_full_text_on_request_and_by_route(app: App, path: str, default: bool) -> None:
    for asked, full in ((None, default), (True, True), (False, False)):
        answer = app.post(path, {"inputs": "Say: ", "parameters": {"return_full_text": asked}}).json
        text = answer[0]["generated_text"] if path == "/" else answer["generated_text"]
        assert text == ("Say: Hello world" if full else "Hello world")


def test_full_text_means_the_whole_prompt_even_when_cut(app: App) -> None:
    body = {"inputs": "a" * 300, "parameters": {"return_full_text": True, "truncate": 5}}
    answer = app.post("/generate", body)
    assert answer.json["generated_text"] == "a" * 300 + "Hello world"
    assert answer.headers["x-prompt-tokens"] == "5"
    assert answer.headers["x-compute-characters"] == "300"


@pytest.mark.row("A: Response headers")
def test_characters_are_counted_not_bytes(app: App) -> None:
    assert app.post("/generate", {"inputs": "é😀"}).headers["x-compute-characters"] == "2"
    assert app.post("/generate_stream", {"inputs": "é😀"}).headers["x-compute-characters"] == "2"


@pytest.mark.fault("llama.cpp#7381")
def test_the_seed_is_used_and_reported(app: App) -> None:
    body = {"inputs": "x", "parameters": {"details": True, "temperature": 1.5, "seed": 99}}
    assert app.post("/generate", body).json["details"]["seed"] == 99
    assert json.loads(app.post("/generate_stream", body).events[-1])["details"]["seed"] == 99
    assert app.backend.requests[-1].sampling.seed == 99


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("given", "kept"),
    [(TRACE, TRACE), ("ff" + TRACE[2:], ""), (TRACE[:-3], ""), ("x", ""), (TRACE.upper(), ""), (None, "")],
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/chat/completions"])
def test_a_valid_trace_context_goes_with_the_request(app: App, path: str, given: str | None, kept: str) -> None:
    body = {"inputs": "x"} if "generate" in path else {"messages": [{"role": "user", "content": "x"}]}
    assert app.post(path, body, {"traceparent": given} if given else None).status == 200
    assert app.backend.requests[-1].traceparent == kept


ERRORS = [
    (GenerationFailed("out of luck"), 424, "Request failed during generation: Server error: out of luck", "generation"),
    (Unavailable("gone"), 503, "The model server cannot be reached: gone", "unavailable"),
    (Overloaded(), 429, "Model is overloaded", "overloaded"),
    (InvalidRequest("too big for the pool"), 422, "Input validation error: too big for the pool", "validation"),
]


@pytest.mark.parametrize(("error", "status", "text", "error_type"), ERRORS)
@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
@pytest.mark.fault("TGI#2749")
def test_errors_before_the_first_token_have_their_status(
    app: App, path: str, error: Exception, status: int, text: str, error_type: str
) -> None:
    app.backend.refusal = error  # pyright: ignore[reportAttributeAccessIssue]
    answer = app.post(path, {"inputs": "x"})
    assert (answer.status, answer.json) == (status, {"error": text, "error_type": error_type})
    app.backend.refusal = None
    app.backend.script = Script((), error=error)  # pyright: ignore[reportArgumentType]
    answer = app.post(path, {"inputs": "x"})
    assert (answer.status, answer.json) == (status, {"error": text, "error_type": error_type})
    assert answer.headers.get("retry-after") == ("1" if status == 429 else None)


@pytest.mark.row("A: Error as SSE event")
def test_an_error_after_the_first_token_is_an_event_and_the_end(app: App) -> None:
    app.backend.script = Script((Said("a"), Said("b")), error=GenerationFailed("out of luck"))
    answer = app.post("/generate_stream", {"inputs": "x"})
    assert answer.status == 200
    assert len(answer.events) == 2
    assert answer.events[1] == (
        b'{"error":"Request failed during generation: Server error: out of luck","error_type":"generation"}'
    )


def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object) -> Script:
        raise KeyError("secret")

    with serving(ScriptedBackend(broken)) as app:
        for path, body in (("/generate", {"inputs": "x"}), ("/generate_stream", {"inputs": "x"})):
            answer = app.post(path, body)
            assert answer.status == 500
            assert answer.json == {"error": "Internal server error", "error_type": "internal"}
        answer = app.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert answer.status == 500
        assert answer.json["error"]["message"] == "Internal server error"
        assert app.services.infer.free_permits == 8
        assert app.metric('tgi_request_failure{err="incomplete"}') == 3
    assert "secret" in caplog.text
