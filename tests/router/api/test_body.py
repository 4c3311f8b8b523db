from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from tests.fakes.app import WAIT_S, App, serving

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
