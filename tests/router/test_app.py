"""The table of routes: what answers to which method."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.app import App, serving
from tgi.router.app import ROUTES, table


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(api_key="Sesame-123") as app:
        yield app


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PROPFIND"])
@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/", {"GET", "HEAD", "POST"}),  # two routes, one of them behind the key
        ("/generate", {"POST"}),
        ("/health", {"GET", "HEAD"}),
        ("/v1/chat/completions", {"POST"}),
        ("/docs/", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(app: App, method: str, path: str, allowed: set[str]) -> None:
    answer = app.request(method, path)
    assert answer.status == 405
    assert answer.json["error"]["code"] == "method_not_allowed" if path.startswith("/v1/") else answer.body == b""
    assert set(re.split(", *", answer.headers["allow"])) == allowed


@pytest.mark.parametrize("path", ["/nothing", "/health/", "//", "/v1/nothing"])
def test_an_unknown_path_is_a_404_for_every_method(app: App, path: str) -> None:
    assert {app.request(method, path).status for method in ("GET", "POST", "PUT")} == {404}


@pytest.mark.parametrize("path", ["/", "/health", "/info", "/v1/models", "/metrics", "/docs/", "/api-doc/openapi.json"])
def test_head_is_get_without_a_body(app: App, path: str) -> None:
    got, answer = app.get(path), app.request("HEAD", path)
    assert (answer.status, answer.body) == (got.status, b"")
    assert answer.headers["content-length"] == str(len(got.body)) or path == "/metrics"


def test_a_route_that_an_operator_chose_stands_before_ours() -> None:
    rows = table(predict_route="/generate", health_route="/")
    assert [(row.method, row.path) for row in rows].count(("POST", "/generate")) == 1
    assert [(row.method, row.path) for row in rows].count(("GET", "/")) == 1
    assert len(rows) == len(ROUTES)


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A host that nobody has a reason to call."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


@pytest.mark.row("B: Multi-modal content parts")
@pytest.mark.parametrize("shape", ["part", "markdown", "prompt", "completion", "vertex"])
def test_nothing_is_ever_fetched(trap: socket.socket, shape: str) -> None:
    url = f"http://127.0.0.1:{trap.getsockname()[1]}/image.png"
    part = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    markdown = {"role": "user", "content": f"![]({url})"}
    path, body, statuses = {
        "part": ("/v1/chat/completions", {"messages": [part]}, {400}),
        "markdown": ("/v1/chat/completions", {"messages": [markdown]}, {200}),
        "prompt": ("/generate", {"inputs": f"![]({url})"}, {200}),
        "completion": ("/v1/completions", {"prompt": f"![]({url})"}, {200}),
        "vertex": ("/vertex", {"instances": [{"messages": [part]}]}, {422}),
    }[shape]
    with serving() as app:
        answer: Any = app.post(path, body)
    assert answer.status in statuses, answer.body
    with pytest.raises(BlockingIOError):  # nobody has knocked
        trap.accept()
