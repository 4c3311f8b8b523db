"""The table of routes: what answers to which method."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.fakes.app import App, serving


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
    ],
)
def test_a_wrong_method_is_told_the_right_ones(app: App, method: str, path: str, allowed: set[str]) -> None:
    answer = app.request(method, path)
    assert (answer.status, answer.body) == (405, b"")
    assert set(re.split(", *", answer.headers["allow"])) == allowed


@pytest.mark.parametrize("path", ["/nothing", "/health/", "//", "/v1/nothing"])
def test_an_unknown_path_is_a_404_for_every_method(app: App, path: str) -> None:
    assert {app.request(method, path).status for method in ("GET", "POST", "PUT")} == {404}
