from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.app import SEED, App, read_until, serving
from tests.fakes.backend import EOS, HELLO, WAIT_S, Said, Script, ScriptedBackend
from tgi.enums import FinishReason
from tgi.errors import GenerationFailed, InvalidRequest, Overloaded, TgiError, Unavailable
from tgi.router.api.answer import LONG_ANSWER
from tgi.router.backend import PromptToken, TopToken
from tgi.router.validation.parameters import Limits
from tgi.router.validation.request import ValidRequest, mix64


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


def test_a_long_answer_is_like_a_short_one(app: App) -> None:
    """It is rendered beside the event loop."""
    app.backend.script = Script([*[Said(f"{index} ") for index in range(LONG_ANSWER)], EOS])
    answer = app.post("/", {"inputs": "x", "parameters": {"details": True, "return_full_text": False}})
    (whole,) = answer.json
    assert whole["generated_text"] == "".join(token["text"] for token in whole["details"]["tokens"][:-1])
    assert answer.headers["x-generated-tokens"] == str(whole["details"]["generated_tokens"]) == str(LONG_ANSWER + 1)


@pytest.mark.fault("TGI#2973")
@pytest.mark.row("A: details, decoder_input_details")
@pytest.mark.parametrize("details", [True, False, None])
def test_the_prompts_logprobs_come_with_the_details(app: App, details: bool | None) -> None:
    prompt = [PromptToken(1, "x", None), PromptToken(2, "y", -0.34000000357627869)]
    app.backend.script = Script((EOS,), prompt=prompt)
    answer = app.post("/generate", {"inputs": "xy", "parameters": {"details": details, "decoder_input_details": True}})
    assert app.backend.requests[-1].prompt_logprobs
    assert list(answer.json["details"]) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert answer.json["details"]["prefill"] == [
        {"id": 1, "text": "x", "logprob": None},
        {"id": 2, "text": "y", "logprob": -0.34},
    ]


@pytest.mark.fault("TGI#2973")
def test_prompt_logprobs_that_the_shard_does_not_compute_are_refused() -> None:
    with serving(limits=Limits(max_input_tokens=100, max_total_tokens=200, vocab_size=300)) as app:
        answer = app.post("/generate", {"inputs": "xy", "parameters": {"decoder_input_details": True}})
        assert answer.status == 422
        assert "`--enable-prefill-logprobs`" in answer.json["error"]
        assert "details" not in app.post("/generate", {"inputs": "x", "parameters": {}}).json


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


@pytest.mark.fault("TGI#189")
@pytest.mark.row("A: truncate")
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
ZEROS = f"00-{'0' * 32}-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("given", "kept"),
    [(TRACE, TRACE), ("ff" + TRACE[2:], ""), (TRACE[:-3], ""), ("x", ""), (TRACE.upper(), ""), (ZEROS, ""), (None, "")],
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
@pytest.mark.parametrize(
    ("error", "status", "text", "error_type"), [*ERRORS, (TgiError("odd"), 500, "odd", "incomplete_generation")]
)
@pytest.mark.parametrize("path", ["/", "/generate_stream"])
def test_an_error_after_the_first_token_is_an_event_and_the_end(
    app: App, path: str, error: TgiError, status: int, text: str, error_type: str
) -> None:
    app.backend.script = Script((Said("a"), Said("b")), error=error)
    answer = app.post(path, {"inputs": "x", "stream": True})
    assert answer.status == 200
    first, last = answer.events
    assert json.loads(first)["token"]["text"] == "a"
    assert json.loads(last) == {"error": text, "error_type": error_type}


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


# -- best_of -----------------------------------------------------------------------------------------------------------


FOUR = Limits(max_input_tokens=100, max_total_tokens=200, vocab_size=300, max_best_of=4, prompt_logprobs=True)


@pytest.fixture(scope="module")
def best_app() -> Iterator[App]:
    with serving(limits=FOUR, max_concurrent_requests=4) as app:
        yield app


@pytest.fixture
def silent_app() -> Iterator[App]:
    """Says what a test makes it say."""
    with serving(ScriptedBackend(None), limits=FOUR, max_concurrent_requests=4) as app:
        yield app


def saying(*texts_and_logprobs: tuple[str, *tuple[float, ...]]) -> Any:
    """A script for each answer of a request, in order: its letters with these logprobs."""
    remaining = iter(texts_and_logprobs)

    def script(request: ValidRequest) -> Script:
        text, *logprobs = next(remaining)
        return Script([Said(letter, logprob=logprob) for letter, logprob in zip(text, logprobs, strict=True)])

    return script


@pytest.mark.row("A: best_of, best_of_sequences")
@pytest.mark.parametrize("path", ["/", "/generate"])
def test_the_best_answer_has_the_highest_mean_logprob(best_app: App, path: str) -> None:
    best_app.backend.script = saying(("abc", -1, -1, -1), ("de", -0.5, -0.25), ("fgh", -0.5, -0.25, -0.375), ("i", -3))
    parameters = {"best_of": 4, "do_sample": True, "details": True, "decoder_input_details": True}
    answer = best_app.post(path, {"inputs": "xy", "parameters": parameters | {"return_full_text": True}})
    assert answer.status == 200
    body = answer.json[0] if path == "/" else answer.json
    details, others = body["details"], body["details"]["best_of_sequences"]
    assert body["generated_text"] == "xyde", "of two with the same mean the first"
    assert [other["generated_text"] for other in others] == ["xyabc", "xyfgh", "xyi"]
    assert [details["seed"], *(other["seed"] for other in others)] == [mix64(SEED, index) for index in (1, 0, 2, 3)]
    keys = ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert list(details) == [*keys, "best_of_sequences"]
    assert all(list(other) == ["generated_text", *keys] for other in others)
    assert [token["text"] for token in others[0]["tokens"]] == ["a", "b", "c"]
    assert [token["id"] for token in details["prefill"]] == [ord("x"), ord("y")]
    assert all(other["prefill"] == details["prefill"] for other in others)
    assert [request.prompt_logprobs for request in best_app.backend.requests[-4:]] == [True, False, False, False]
    assert len({request.siblings for request in best_app.backend.requests[-4:]}) == 1
    assert (answer.headers["x-prompt-tokens"], answer.headers["x-generated-tokens"]) == ("2", "2")
    assert "x-compute-time" in answer.headers


def test_a_lower_sum_wins_by_its_mean_and_nan_never(best_app: App) -> None:
    nan = float("nan")
    best_app.backend.script = saying(("ab", nan, -0.1), ("cd", -0.5, -0.5), ("efgh", -0.4, -0.4, -0.4, -0.4))
    parameters = {"best_of": 3, "temperature": 1.5}
    assert best_app.post("/generate", {"inputs": "x", "parameters": parameters}).json == {"generated_text": "efgh"}


def test_the_headers_tell_the_time_until_the_last_answer(silent_app: App) -> None:
    client = silent_app.open("/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}})
    best, other = silent_app.backend.next_playing(), silent_app.backend.next_playing()
    best.say(Said("a", logprob=-0.1), script=Script((), total_s=1.0))
    other.say(Said("b", logprob=-0.2), script=Script((), total_s=3.0))
    head = read_until(client, b"generated_text")
    assert b"x-total-time: 3000" in head
    assert b"x-compute-time: 3.0" in head


@pytest.mark.parametrize("best_of", [0, 1, None])
def test_one_is_no_best_of(best_app: App, best_of: int | None) -> None:
    best_app.backend.script = HELLO
    before = len(best_app.backend.requests)
    body = {"inputs": "x", "parameters": {"best_of": best_of, "details": True, "seed": 3, "do_sample": True}}
    details = best_app.post("/generate", body).json["details"]
    assert "best_of_sequences" not in details
    assert details["seed"] == 3
    assert len(best_app.backend.requests) == before + 1


def test_more_answers_than_permits(silent_app: App) -> None:
    client = silent_app.open("/generate_stream", {"inputs": "x"})
    running = silent_app.backend.next_playing()
    answer = silent_app.post("/generate", {"inputs": "x", "parameters": {"best_of": 4, "do_sample": True}})
    assert (answer.status, answer.json["error_type"]) == (429, "overloaded")
    assert answer.headers["retry-after"] == "1"
    running.say("a", script=HELLO)
    read_until(client, b"0\r\n\r\n")
    assert silent_app.services.infer.free_permits == 4
    answer = silent_app.post("/generate", {"inputs": "x", "parameters": {"best_of": 10**9, "do_sample": True}})
    assert answer.json["error"] == "Input validation error: `best_of` must be > 0 and <= 4. Given: 1000000000"


def test_more_answers_than_there_can_ever_be() -> None:
    with serving(limits=FOUR, max_concurrent_requests=2) as app:
        answer = app.post("/generate", {"inputs": "x", "parameters": {"best_of": 3, "do_sample": True}})
        assert (answer.status, answer.json["error_type"]) == (422, "validation")
        assert "at most 2 answers" in answer.json["error"]
        assert "retry-after" not in answer.headers


def test_the_first_that_fails_ends_all(silent_app: App) -> None:
    client = silent_app.open("/generate", {"inputs": "x", "parameters": {"best_of": 3, "do_sample": True}})
    playing = [silent_app.backend.next_playing() for _ in range(3)]
    playing[0].say("a", script=HELLO)
    playing[1].fail(GenerationFailed("out of luck"))
    head = read_until(client, b"}")
    assert b" 424 " in head
    assert head.endswith(b'"Request failed during generation: Server error: out of luck","error_type":"generation"}')
    assert playing[2].cancelled.wait(WAIT_S)
    assert silent_app.services.infer.free_permits == 4


@pytest.mark.fault("vllm#14326")
def test_a_client_that_hangs_up_ends_all_of_its_answers(silent_app: App) -> None:
    client = silent_app.open("/generate", {"inputs": "x", "parameters": {"best_of": 3, "do_sample": True}})
    playing = [silent_app.backend.next_playing() for _ in range(3)]
    playing[1].say("a")
    client.close()
    assert all(one.cancelled.wait(WAIT_S) for one in playing)


# -- what is asked, and what is told first -----------------------------------------------------------------------------

# Each wrong by itself, in TGI's order.
CHECKS: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": -2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.5}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"truncate": 101}, "`truncate` must be strictly positive and less than 100. Given: 101"),
    (
        {"inputs": "a" * 101, "max_new_tokens": 100},
        "`inputs` tokens + `max_new_tokens` must be <= 200. Given: 101 `inputs` tokens and 100 `max_new_tokens`",
    ),
    ({"inputs": "a" * 101}, "`inputs` must have less than 100 tokens. Given: 101"),
    ({"grammar": {"type": "regex"}}, "`grammar` has no `value`"),
]


def post_parameters(app: App, path: str, fields: dict[str, Any]) -> Any:
    parameters = {name: value for name, value in fields.items() if name != "inputs"}
    return app.post(path, {"inputs": fields.get("inputs", "x"), "parameters": {"max_new_tokens": 5} | parameters})


@pytest.mark.row("A: Error JSON, error types and statuses")
@pytest.mark.parametrize("index", range(len(CHECKS)))
@pytest.mark.parametrize("path", ["/", "/generate"])
def test_the_first_of_two_wrong_values_is_told(app: App, path: str, index: int) -> None:
    fields, text = CHECKS[index]
    following = CHECKS[index + 1][0] if index + 1 < len(CHECKS) else {}
    for body in (fields, following | fields):
        answer = post_parameters(app, path, body)
        assert (answer.status, answer.json["error"]) == (422, f"Input validation error: {text}")
    assert app.services.infer.free_permits == 8


@pytest.mark.fault("TGI#2749")
@pytest.mark.parametrize(("fields", "text"), CHECKS)
def test_a_stream_tells_the_same_with_the_same_status(app: App, fields: dict[str, Any], text: str) -> None:
    answer = post_parameters(app, "/generate_stream", fields)
    if "best_of" in fields:
        text = "`best_of` != 1 is not supported when streaming tokens"
    assert (answer.status, answer.json["error"]) == (422, f"Input validation error: {text}")


@pytest.mark.parametrize(
    ("in_body", "header", "priority"),
    [(None, None, 0), (None, "7", 7), (None, "-3", -3), (5, "7", 5), (0, "7", 0), (None, str(-(2**31)), -(2**31))],
)
@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_the_priority_of_the_body_or_else_of_the_header(
    app: App, path: str, in_body: int | None, header: str | None, priority: int
) -> None:
    headers = {} if header is None else {"X-TGI-Priority": header}
    assert app.post(path, {"inputs": "x", "parameters": {"priority": in_body}}, headers).status == 200
    assert app.backend.requests[-1].priority == priority
    assert app.post(path, {"inputs": "x"}, headers).status == 200
    assert app.backend.requests[-1].sampling.do_sample, "no parameters at all still means sampling"


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_the_header_says_whose_request_it_is(app: App, path: str) -> None:
    assert app.post(path, {"inputs": "x"}, {"X-TGI-Client": "tenant 7"}).status == 200
    assert app.backend.requests[-1].client == "tenant 7"
    assert app.post(path, {"inputs": "x"}).status == 200
    assert app.backend.requests[-1].client == ""


@pytest.mark.parametrize("header", ["", "high", "1.5", "0x1", "1e3", str(2**31), "9" * 5_000, "٣"])
def test_a_priority_that_is_none_is_refused_by_name(app: App, header: str) -> None:
    answer = app.post("/generate_stream", {"inputs": "x"}, {"x-tgi-priority": header.encode().decode("latin-1")})
    assert answer.status == 422
    assert answer.json["error"].startswith("Input validation error: the header `x-tgi-priority` must be an integer")
    assert len(answer.body) < 1_000
