from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.fakes.app import App, serving
from tgi.router.app import ROUTES

KEY = "Sesame-123"
COMPUTE = {
    "/": {"inputs": "x"},
    "/generate": {"inputs": "x"},
    "/generate_stream": {"inputs": "x"},
    "/tokenize": {"inputs": "x"},
    "/chat_tokenize": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/invocations": {"inputs": "x"},
    "/vertex": {"instances": [{"inputs": "x"}]},
    "/flush_cache": None,
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[App]:
    with serving(api_key=KEY, cors_allow_origin=("https://a.example", "https://b.example")) as app:
        yield app


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.mark.row("B: API key")
@pytest.mark.fault("TGI#2026")
@pytest.mark.parametrize("path", COMPUTE)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_key_opens_and_the_schemes_case_does_not_matter(guarded: App, path: str, scheme: str) -> None:
    assert guarded.post(path, COMPUTE[path], {"authorization": f"{scheme} {KEY}"}).status == 200


@pytest.mark.parametrize("path", COMPUTE)
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY.lower()}", f"Basic {KEY}", KEY, "Bearer é"],
)
def test_without_the_key_it_is_a_401(guarded: App, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    answer = guarded.post(path, COMPUTE[path], headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    if path.startswith("/v1/"):
        assert answer.json["error"]["type"] == "authentication_error"
        # Anthropic's errors have no code.
        assert path.startswith("/v1/messages") or answer.json["error"]["code"] == "invalid_api_key"
    else:
        assert answer.body == b""
    assert KEY.encode() not in answer.body


@pytest.mark.parametrize("path", COMPUTE)
def test_the_key_may_come_as_anthropics_clients_send_it(guarded: App, path: str) -> None:
    assert guarded.post(path, COMPUTE[path], {"x-api-key": KEY}).status == 200
    # Some send both, one of them a placeholder.
    assert guarded.post(path, COMPUTE[path], {"x-api-key": KEY, "authorization": "Bearer none"}).status == 200
    for wrong in ("", KEY.lower(), f"Bearer {KEY}", f"{KEY}x", "é"):
        assert guarded.post(path, COMPUTE[path], {"x-api-key": wrong}).status == 401


def test_every_route_that_costs_work_is_tried_here() -> None:
    assert COMPUTE.keys() >= {row.path for row in ROUTES if row.is_guarded}


def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr("tgi.router.api.middleware.hmac.compare_digest", compare)
    with serving(api_key=KEY) as app:
        assert app.post("/tokenize", {"inputs": "x"}, {"authorization": "Bearer S"}).status == 401
    assert (b"S", KEY.encode()) in compared


def test_the_key_is_in_no_log(caplog: pytest.LogCaptureFixture, guarded: App) -> None:
    with caplog.at_level(0):
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"authorization": f"Basic {KEY}"}):
            guarded.post("/generate", {"inputs": "x"}, headers)
            guarded.post("/generate", {"inputs": ""}, headers)
    assert KEY not in caplog.text


def test_a_wrong_key_is_told_before_a_wrong_body(guarded: App) -> None:
    assert guarded.post("/generate", raw=b"{").status == 401


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/info", "/metrics", "/v1/models"])
def test_what_is_no_work_stays_open(guarded: App, path: str) -> None:
    assert guarded.get(path).status == 200


@pytest.mark.row("B: CORS origins")
@pytest.mark.parametrize("path", [*COMPUTE, "/info", "/docs/", "/nothing"])
def test_a_preflight_may_carry_authorization(app: App, path: str) -> None:
    asked = {
        "origin": "https://any.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    answer = app.request("OPTIONS", path, headers=asked)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert {"GET", "POST"} == set(re.split(", *", answer.headers["access-control-allow-methods"]))
    assert "authorization" in answer.headers["access-control-allow-headers"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/info"])
def test_answers_may_be_read_from_any_origin_by_default(app: App, path: str) -> None:
    origin = {"origin": "https://any.example"}
    answer = app.get(path, origin) if path == "/info" else app.post(path, {"inputs": "x"}, origin)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_what_an_answer_tells_of_itself_may_be_read(app: App, path: str) -> None:
    answer = app.post(path, COMPUTE[path], {"origin": "https://any.example"})
    exposed = set(re.split(", *", answer.headers["access-control-expose-headers"]))
    assert {name for name in answer.headers if name.startswith("x-")} <= exposed
    assert "retry-after" in exposed


def test_errors_may_be_read_too(app: App) -> None:
    answer = app.post("/generate", {"inputs": ""}, {"origin": "https://any.example"})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (422, "*")


@pytest.mark.parametrize(
    ("origin", "allowed"), [("https://a.example", True), ("https://b.example", True), ("https://c.example", False)]
)
def test_only_listed_origins_where_there_is_a_list(guarded: App, origin: str, allowed: bool) -> None:
    answer = guarded.get("/info", {"origin": origin})
    assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/nothing"])
def test_a_request_id_is_echoed(app: App, path: str) -> None:
    assert app.post(path, {"inputs": "x"}, {"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"


@pytest.mark.parametrize("given", [None, "", "x" * 129, "two words", "é"])
def test_a_request_without_a_usable_id_gets_one(app: App, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    first, second = (app.get("/info", headers).headers["x-request-id"] for _ in range(2))
    assert re.fullmatch("[0-9a-f]{24}", first)
    assert first != second
