"""What uvicorn's protocol is changed for, over real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from tests.fakes.app import WAIT_S, App, read_until, serving
from tgi.router.api.server import MAX_HEAD

BODY = json.dumps({"inputs": "x" * 50}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
H2C = b"upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\n"
WEBSOCKET = b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-key: x\r\n"


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


def connect(app: App) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", app.port), timeout=WAIT_S)
    app.sockets.append(client)
    return client


def tokenize(*fields: bytes, body: bytes = BODY) -> bytes:
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return head + b"".join(fields) + b"\r\n" + body


WITH_LENGTH = tokenize(H2C, b"content-length: %d\r\n" % len(BODY))
CHUNKED = tokenize(H2C, b"transfer-encoding: chunked\r\n", body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))


@pytest.mark.parametrize("request_bytes", [WITH_LENGTH, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("piece", [1, 100, 10_000])
def test_a_wish_for_h2c_is_declined_and_the_body_is_kept(app: App, request_bytes: bytes, piece: int) -> None:
    client = connect(app)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(request_bytes), piece):
        client.sendall(request_bytes[start : start + piece])
    answer = read_until(client, b"]")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b'"id"') == 50
    client.sendall(HEALTH)  # the connection goes on
    assert read_until(client, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_requests_behind_a_declined_wish_are_answered_in_order(app: App) -> None:
    client = connect(app)
    client.sendall(WITH_LENGTH + WITH_LENGTH + b"GET /nothing HTTP/1.1\r\nhost: a\r\n\r\n")
    answers = read_until(client, b" 404 ")
    assert answers.count(b"HTTP/1.1 200 ") == 2


def test_a_wish_for_a_websocket_gets_the_plain_answer(app: App) -> None:
    client = connect(app)
    client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n" + WEBSOCKET + b"\r\n")
    assert read_until(client, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_connect_is_refused(app: App) -> None:
    client = connect(app)
    client.sendall(b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n")
    assert read_until(client, b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")


LAST_CHUNK = tokenize(b"transfer-encoding: chunked\r\n", body=b"0\r\n")
FIELD = b"x: y\r\n" * 200


@pytest.mark.parametrize(
    ("beginning", "more"),
    [
        (b"GET /", b"x" * 1000),
        (b"GET / HTTP/1.1\r\nx: ", b"x" * 1000),
        (b"GET / HTTP/1.1\r\n", FIELD),
        (LAST_CHUNK + b"x: ", b"x" * 1000),
        (LAST_CHUNK, FIELD),
    ],
    ids=["target", "value", "fields", "trailer", "trailers"],
)
def test_fields_without_end_are_refused(app: App, beginning: bytes, more: bytes) -> None:
    client = connect(app)
    sent = 0
    with contextlib.suppress(ConnectionError):
        client.sendall(beginning)
        while sent < 40 * MAX_HEAD:  # far more than the buffers of two sockets hold
            client.sendall(more)
            sent += len(more)
    assert sent < 40 * MAX_HEAD


def test_trailers_are_ignored_and_long_chunks_are_no_fields() -> None:
    parts = [BODY[:20], BODY[20:], b" " * (2 * MAX_HEAD)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    with serving(payload_limit=3 * MAX_HEAD) as app:
        client = connect(app)
        client.sendall(tokenize(b"transfer-encoding: chunked\r\n", body=body + b"0\r\nx: y\r\n\r\n"))
        assert read_until(client, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_long_head_is_told_why_it_is_refused_and_a_shorter_one_is_not(app: App) -> None:
    client = connect(app)
    client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (MAX_HEAD // 2) + b"\r\n\r\n")
    assert read_until(client, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    head = b"GET /health HTTP/1.1\r\nhost: a\r\nx: "
    client.sendall(head.ljust(MAX_HEAD + 1, b"y"))  # nothing unread is left behind that would reset the connection
    assert b"HTTP/1.1 431 " in read_until(client, b"too large")
