from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.app import WAIT_S, App, read_until, serving
from tgi.router.api import chat_prompt, messages, responses
from tgi.router.api.body import LONG_BODY
from tgi.router.app import ROUTES

LIMIT = 20_000


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(payload_limit=LIMIT) as app:
        yield app


def of_size(size: int) -> bytes:
    """A valid request of exactly `size` bytes; most of it is a field that nobody knows."""
    head, tail = b'{"inputs":"x","pad":"', b'"}'
    return head + b"p" * (size - len(head) - len(tail)) + tail


@pytest.mark.row("B: Payload limit")
@pytest.mark.fault("TGI#1802")
@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413)])
def test_the_limit_is_exact(app: App, size: int, status: int) -> None:
    assert app.post("/generate", raw=of_size(size)).status == status


@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413)])
def test_the_limit_holds_without_a_content_length(app: App, size: int, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", app.port, timeout=WAIT_S)
    body = of_size(size)
    chunks = (body[at : at + 4000] for at in range(0, size, 4000))
    connection.request("POST", "/generate", chunks, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == status
    connection.close()


@pytest.mark.fault("TGI#1802")
def test_too_large_is_plain_text_on_tgis_routes_and_openais_object_on_v1(app: App) -> None:
    answer = app.post("/generate", raw=of_size(LIMIT + 1))
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.body.startswith(b"Failed to buffer the request body: length limit exceeded (20000 bytes")
    answer = app.post("/v1/chat/completions", raw=of_size(LIMIT + 1))
    assert answer.status == 413
    assert answer.json["error"]["code"] == "request_entity_too_large"


def test_the_default_limit_lets_a_body_of_nearly_2_mb_pass() -> None:
    with serving(payload_limit=2_000_000) as app:
        statuses = [app.post("/v1/chat/completions", raw=chat_of_size(2_000_000 + extra)).status for extra in (0, 1)]
    assert statuses == [200, 413]


def chat_of_size(size: int) -> bytes:
    head, tail = b'{"messages":[{"role":"user","content":"x"}],"pad":"', b'"}'
    return head + b"p" * (size - len(head) - len(tail)) + tail


def test_the_content_type_is_told_before_the_size_and_the_size_before_the_syntax(app: App) -> None:
    large = b"{" * (LIMIT + 1)
    assert app.post("/generate", raw=large, headers={"content-type": "text/plain"}).status == 415
    assert app.post("/generate", raw=large).status == 413
    assert app.post("/generate", raw=large[:100]).status == 400


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/problem+json", 200),
        ("application/jsonl", 415),
        ("text/json", 415),
        ("", 415),
    ],
)
def test_content_types(app: App, content_type: str, status: int) -> None:
    assert app.post("/generate", raw=b'{"inputs":"x"}', headers={"content-type": content_type}).status == status


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"inputs":"x"} x',
        b'{"inputs":"\xff"}',
        b'{"inputs":"\\ud800"}',
        b'{"inputs":"x","a":' + b"[" * 9000,
    ],
)
def test_what_is_no_json_is_a_400(app: App, raw: bytes) -> None:
    answer = app.post("/generate", raw=raw)
    assert answer.status == 400
    assert answer.body.startswith(b"Failed to parse the request body as JSON: ")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"[]", "Expected `object`, got `array`"),
        (b'{"inputs":null}', "inputs: Expected `str`, got `null`"),
        (b"{}", "missing field `inputs`"),
        (b'{"inputs":"x","parameters":[]}', "parameters: Expected `object | null`, got `array`"),
        (b'{"inputs":"x","parameters":{"top_k":2147483648}}', "parameters.top_k: Expected `int` <= 2147483647"),
        (b'{"inputs":"x","parameters":{"max_new_tokens":-1}}', "parameters.max_new_tokens: Expected `int` >= 0"),
        (b'{"inputs":"x","parameters":{"max_new_tokens":1.5}}', "max_new_tokens: Expected `int | null`, got `float`"),
        (b'{"inputs":"x","parameters":{"temperature":1e400}}', "parameters.temperature: Number out of range"),
        (b'{"inputs":"x","parameters":{"do_sample":"yes"}}', "parameters.do_sample: Expected `bool | null`, got `str`"),
        (b'{"inputs":"x","parameters":{"stop":[1]}}', "parameters.stop[0]: Expected `str`, got `int`"),
    ],
)
def test_json_of_another_shape_is_a_422_naming_the_place(app: App, raw: bytes, told: str) -> None:
    answer = app.post("/generate", raw=raw)
    assert answer.status == 422
    text = answer.body.decode()
    assert text.startswith("Failed to deserialize the JSON body into the target type: ")
    assert told in text


def test_a_refused_body_is_no_request_that_counts(app: App) -> None:
    before = app.metric("tgi_request_count")
    app.post("/generate", raw=b"{")
    assert app.metric("tgi_request_count") == before


@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP, identity"])
def test_a_compressed_body_is_refused_by_name(app: App, coding: str) -> None:
    raw = gzip.compress(b'{"inputs":"x"}')
    answer = app.post("/generate", raw=raw, headers={"content-encoding": coding})
    assert (answer.status, coding.lower().encode() in answer.body) == (415, True)
    assert app.post("/generate", raw=b'{"inputs":"x"}', headers={"content-encoding": "identity"}).status == 200


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "nan", "1e", "0x1", "01", "'x'", "undefined"])
def test_what_only_looks_like_a_number_is_a_400(app: App, literal: str) -> None:
    raw = b'{"inputs":"x","parameters":{"temperature":%b}}' % literal.encode()
    assert app.post("/generate", raw=raw).status == 400


@pytest.mark.parametrize("field", ["seed", "top_k", "temperature", "unknown"])
@pytest.mark.parametrize("number", ["1" + "0" * 25, "-" + "9" * 5000, "1e400", "-1e999999", "0." + "1" * 5000])
def test_numbers_without_measure_are_taken_or_refused(app: App, field: str, number: str) -> None:
    raw = b'{"inputs":"x","parameters":{"do_sample":true,"%b":%b}}' % (field.encode(), number.encode())
    assert app.post("/generate", raw=raw).status in (200, 400, 422)


@pytest.mark.parametrize("deep", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize(
    "where", [b'{"inputs":%b', b'{"inputs":"x","a":%b', b'{"inputs":"x","parameters":{"grammar":%b']
)
def test_deep_nesting_is_refused(app: App, deep: bytes, where: bytes) -> None:
    assert app.post("/generate", raw=where % (deep * 3000)).status in (400, 422)


@pytest.mark.parametrize("opening", ['{"a":', "["])
def test_what_the_reader_just_lets_pass_is_no_fault_of_the_server(app: App, opening: str) -> None:
    """The way behind the reader of a body is deeper than the way to it."""
    closing = {"{": "}", "[": "]"}[opening[0]]
    told = set()
    for depth in range(900, 1000, 2):
        value = opening * depth + "1" + closing * depth
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {value}}}}}}}'
        body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "tools": [{tool}]}}'
        answer = app.post("/v1/chat/completions", raw=body.encode())
        assert answer.status == 400, answer.body
        told.add(answer.json["error"]["message"])
    assert "The request body is nested too deeply" in told


HI = {"role": "user", "content": "Hi"}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HI]},
    "/chat_tokenize": {"messages": [HI]},
    "/invocations": {"messages": [HI]},
    "/vertex": {"instances": [{"messages": [HI]}]},
    "/v1/responses": {"input": [HI]},
    "/v1/messages": {"messages": [HI], "max_tokens": 50},
    "/v1/messages/count_tokens": {"messages": [HI]},
}


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("is_long", [False, True])
def test_long_chats_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch, path: str, is_long: bool) -> None:
    threads: list[threading.Thread] = []

    def noting(module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return real(*arguments)

        monkeypatch.setattr(module, name, noted)

    noting(chat_prompt, "template_messages")
    noting(messages, "chat_of")
    noting(responses, "chat_of")
    body = json.loads(json.dumps(CHATS[path]))
    chat = body["instances"][0] if path == "/vertex" else body
    chat["ignored"] = "x" * (LONG_BODY if is_long else 1)
    with serving(payload_limit=2 * LONG_BODY) as app:
        assert app.post(path, body).status == 200
        assert [thread is not app.thread for thread in threads] == [is_long] * len(threads)
    assert threads


def test_of_two_equal_keys_the_last_one_counts(app: App) -> None:
    assert app.post("/tokenize", raw=b'{"inputs":"xxx","inputs":"x"}').json[-1]["text"] == "x"


def test_whoever_waits_for_a_continue_gets_it_and_is_spared_a_body_too_large(app: App) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
    for length, told in ((14, b"HTTP/1.1 100 Continue\r\n"), (LIMIT + 1, b"HTTP/1.1 413 ")):
        with socket.create_connection(("127.0.0.1", app.port), timeout=WAIT_S) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % length)
            answer = read_until(client, b"\r\n\r\n")
            assert answer.startswith(told)
            if length == 14:
                client.sendall(b'{"inputs":"x"}')
                assert b" 200 OK" in read_until(client, b"]")


PATHS = sorted({row.path for row in ROUTES if row.method == "POST"})
NAMES = st.sampled_from(
    [
        "inputs",
        "parameters",
        "messages",
        "prompt",
        "instances",
        "role",
        "content",
        "stream",
        "stop",
        "n",
        "tools",
        "seed",
    ]
) | st.text(max_size=5)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6))


def test_no_bytes_are_a_fault_of_the_server(app: App) -> None:
    @settings(max_examples=60)
    @given(
        path=st.sampled_from(PATHS), body=st.binary(max_size=200) | TREES.map(lambda tree: json.dumps(tree).encode())
    )
    def send(path: str, body: bytes) -> None:
        answer = app.post(path, raw=body)
        assert answer.status in (200, 400, 422), (path, body, answer.body)

    send()
    assert app.services.infer.free_permits == app.services.infer.max_answers


def test_no_change_of_a_good_body_is_a_fault_of_the_server(app: App) -> None:
    good = json.dumps(
        {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 5, "stop": ["x"], "seed": 3}
    ).encode()

    @settings(max_examples=60)
    @given(at=st.integers(0, len(good)), until=st.integers(0, 6), new=st.binary(max_size=6))
    def send(at: int, until: int, new: bytes) -> None:
        answer = app.post("/v1/chat/completions", raw=good[:at] + new + good[at + until :])
        assert answer.status in (200, 400), answer.body

    send()
