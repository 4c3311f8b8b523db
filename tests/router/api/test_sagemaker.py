"""POST /invocations: the body of three routes, and whichever answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.app import App, serving

PROMPT = {"inputs": "x", "parameters": {"max_new_tokens": 5}}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
COMPLETION = {"prompt": "x", "max_tokens": 5}
ROUTES = {"/": PROMPT, "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
CHANGING = {"id", "created"}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


def steady(answer: Any) -> Any:
    return {key: value for key, value in answer.items() if key not in CHANGING} if isinstance(answer, dict) else answer


@pytest.mark.row("B: /invocations, /vertex, AIP routes")
@pytest.mark.parametrize("path", ROUTES)
def test_it_answers_as_the_route_of_the_body(app: App, path: str) -> None:
    found, expected = app.post("/invocations", ROUTES[path]), app.post(path, ROUTES[path])
    assert (found.status, expected.status) == (200, 200)
    assert steady(found.json) == steady(expected.json)
    assert found.headers.keys() == expected.headers.keys()


@pytest.mark.parametrize("path", ROUTES)
def test_it_streams_as_the_route_of_the_body(app: App, path: str) -> None:
    found = app.post("/invocations", ROUTES[path] | {"stream": True})
    expected = app.post(path, ROUTES[path] | {"stream": True})
    assert found.headers["content-type"] == "text/event-stream"
    assert len(found.events) == len(expected.events)
    assert found.events[-1:] == ([b"[DONE]"] if path != "/" else expected.events[-1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_errors_are_those_of_the_route_of_the_body(app: App, path: str, stream: bool) -> None:
    body = ROUTES[path] | {"stream": stream}
    body |= {"parameters": {"max_new_tokens": 0}} if path == "/" else {"max_tokens": 0}
    found, expected = app.post("/invocations", body), app.post(path, body)
    assert (found.status, found.body) == (expected.status, expected.body)
    assert found.status == (422 if path == "/" else 400)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({**PROMPT, **CHAT, **COMPLETION}, "generated_text"),
        ({**CHAT, **COMPLETION}, "message"),
        ({"inputs": None, **CHAT}, "message"),
        ({"inputs": None, "messages": None, **COMPLETION}, "text"),
    ],
)
def test_the_first_key_that_is_given_decides(app: App, body: dict[str, Any], key: str) -> None:
    answer = app.post("/invocations", body).json
    assert key in (answer[0] if isinstance(answer, list) else answer["choices"][0])


def test_a_key_of_another_route_does_not_save_a_wrong_one(app: App) -> None:
    answer = app.post("/invocations", {"inputs": 5, **CHAT})
    assert (answer.status, b"inputs: Expected `str`" in answer.body) == (422, True)


@pytest.mark.parametrize("raw", [b"{}", b'{"input":"x"}', b'{"inputs":null}', b"[]", b"5"])
def test_what_is_none_of_them_is_a_422(app: App, raw: bytes) -> None:
    answer = app.post("/invocations", raw=raw)
    assert answer.status == 422
    assert answer.body.startswith(b"Failed to deserialize the JSON body into the target type: ")


def test_a_body_that_cannot_be_read_is_refused_as_elsewhere(app: App) -> None:
    assert app.post("/invocations", raw=b"{").status == 400
    assert app.post("/invocations", raw=b"{}", headers={"content-type": "text/plain"}).status == 415
    assert app.post("/invocations", raw=b'{"inputs":"' + b"x" * 30_000 + b'"}').status == 413
