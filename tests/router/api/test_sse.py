"""Streams over real sockets: what leaves when, and what happens to clients that are slow, silent or gone."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from tests.fakes.app import App, dechunk, read_until, serving
from tests.fakes.backend import EOS, HELLO, WAIT_S, Playing, Said, Script, ScriptedBackend
from tgi.enums import FinishReason
from tgi.errors import GenerationFailed
from tgi.router.validation.parameters import Limits

NATIVE = "/generate_stream"
CHAT = "/v1/chat/completions"
BODIES = {
    NATIVE: {"inputs": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "stream": True},
}
# More than the sockets' and the server's buffers hold: the client must be waited for.
MANY = 200
LITTLE = 1 << 14  # receive buffer of a slow client, bytes
BIG = "x" * 2000


def listen(app: App, path: str = NATIVE, receive_buffer: int | None = None) -> tuple[socket.socket, Playing]:
    client = app.open(path, BODIES[path], receive_buffer)
    return client, app.backend.next_playing()


def texts(body: bytes) -> list[str]:
    """Of a native stream."""
    return [json.loads(event.removeprefix(b"data: "))["token"]["text"] for event in body.split(b"\n\n") if event]


@pytest.fixture
def app() -> object:
    with serving(ScriptedBackend(None)) as app:
        yield app


def test_every_token_leaves_at_once(app: App) -> None:
    client, playing = listen(app)
    received = b""
    for text in ("one", "two", "three"):
        playing.say(text)
        received = read_until(client, f'"{text}"'.encode(), received)
    playing.say(EOS, script=HELLO)
    received = read_until(client, b"0\r\n\r\n", received)
    assert texts(dechunk(received)) == ["one", "two", "three", "</s>"]


def test_the_head_waits_for_the_first_event(app: App) -> None:
    client, playing = listen(app)
    # Another whole request on the same loop in between: had the head been sent on its own, it would be here.
    assert app.get("/health").status == 200
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.recv(1)
    client.settimeout(WAIT_S)
    playing.fail(GenerationFailed("early"))
    received = read_until(client, b"}")
    assert received.startswith(b"HTTP/1.1 424 ")
    assert b"content-type: application/json" in received


def test_a_connection_is_used_again_after_a_stream(app: App) -> None:
    client, playing = listen(app)
    for _ in range(2):
        playing.say("a", EOS, script=HELLO)
        received = read_until(client, b"0\r\n\r\n")
        assert texts(dechunk(received)) == ["a", "</s>"]
        client.sendall(
            b"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 14\r\n\r\n{"inputs":"x"}'
        )
        playing = app.backend.next_playing()


def test_a_slow_reader_gets_everything_in_order_and_holds_up_nobody(app: App) -> None:
    slow, slow_playing = listen(app, receive_buffer=LITTLE)
    tokens = [Said(f"{index} {BIG}") for index in range(MANY)]
    slow_playing.say(*tokens, EOS, script=HELLO)
    fast, fast_playing = listen(app)
    fast_playing.say("quick", EOS, script=HELLO)
    assert texts(dechunk(read_until(fast, b"0\r\n\r\n"))) == ["quick", "</s>"]
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        received += slow.recv(1 << 20)
    # The marks of the chunks may cut an event anywhere: join first, then look.
    assert texts(dechunk(bytes(received))) == [token.text for token in tokens] + ["</s>"]
    assert app.metric("tgi_request_success") == 2


def test_a_slow_reader_whose_request_fails_gets_its_tokens_then_the_error(app: App) -> None:
    client, playing = listen(app, receive_buffer=LITTLE)
    playing.say(*[Said(BIG)] * MANY)
    playing.fail(GenerationFailed("late"))
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        received += client.recv(1 << 20)
    events = dechunk(bytes(received)).split(b"\n\n")[:-1]
    assert len(events) == MANY + 1
    assert b"late" in events[-1]


@pytest.mark.parametrize("path", [NATIVE, CHAT])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.row("G: 4 a disconnect frees blocks within one step")
def test_a_client_that_hangs_up_is_cancelled_at_once(app: App, path: str, tokens: int) -> None:
    client, playing = listen(app, path)
    if tokens:
        playing.say(*["a"] * tokens)
        read_until(client, b"data: ")
    client.close()
    assert playing.cancelled.wait(WAIT_S)
    assert app.metric('tgi_request_failure{err="dropped"}') == 1
    assert app.metric("tgi_request_success") == 0
    assert app.services.infer.free_permits == 8
    assert len(app.services.pulse) == 0


def test_a_slow_client_that_hangs_up_is_cancelled_at_once(app: App) -> None:
    client, playing = listen(app, receive_buffer=LITTLE)
    playing.say(*[Said(BIG)] * MANY)
    read_until(client, b"data: ")
    client.close()
    assert playing.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("path", ["/generate", "/", CHAT])
def test_a_plain_request_whose_client_hangs_up_is_cancelled_at_once(app: App, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"inputs": "x"}
    client = app.open(path, body)
    playing = app.backend.next_playing()
    playing.say("a")
    client.close()
    assert playing.cancelled.wait(WAIT_S)
    assert app.metric('tgi_request_failure{err="dropped"}') == 1
    assert app.services.infer.free_permits == 8


@pytest.mark.parametrize("path", [NATIVE, CHAT])
def test_silence_is_filled_with_comments_once_the_stream_is_open(path: str) -> None:
    with serving(ScriptedBackend(None), keep_alive_s=0.02) as app:
        client, playing = listen(app, path)
        playing.say("a")
        received = read_until(client, b":\n\n\r\n3\r\n:\n\n")
        playing.say(EOS, script=HELLO)
        received = read_until(client, b"0\r\n\r\n", received)
        blocks = dechunk(received).split(b"\n\n")[:-1]
        assert blocks[1] == b":"
        assert all(block == b":" or block.startswith(b"data: ") for block in blocks)


def test_tokens_that_show_nothing_yet_are_silence() -> None:
    """As those of a tool's name, until it is complete."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    limits = Limits(max_input_tokens=1000, max_total_tokens=2000, vocab_size=300)
    with serving(ScriptedBackend(None), limits=limits, keep_alive_s=0.02) as app:
        client = app.open(CHAT, {**BODIES[CHAT], "tools": tools})
        playing = app.backend.next_playing()
        playing.say('{"name": "')
        client.settimeout(0.001)
        received = b""
        give_up = time.monotonic() + WAIT_S
        while not received.endswith(b":\n\n\r\n"):
            assert time.monotonic() < give_up, received
            playing.say("x")
            with contextlib.suppress(TimeoutError):
                received += client.recv(1 << 16)
        client.settimeout(WAIT_S)
        playing.say(EOS, script=HELLO)
        received = read_until(client, b"0\r\n\r\n", received)
        assert b'"content":"{\\"name\\": \\"xx' in received


def test_no_comment_opens_a_stream_before_its_first_event() -> None:
    with serving(ScriptedBackend(None), keep_alive_s=0.004) as app:
        client, playing = listen(app)
        other, other_playing = listen(app)
        other_playing.say("a")
        read_until(other, b":\n\n\r\n3\r\n:\n\n")  # the timer has gone round more than once
        playing.fail(GenerationFailed("early"))
        assert read_until(client, b"}").startswith(b"HTTP/1.1 424 ")


def test_a_client_that_takes_nothing_for_long_is_cut_off() -> None:
    with serving(ScriptedBackend(None), stall_s=0.1) as app:
        client, playing = listen(app, receive_buffer=LITTLE)
        playing.say(*[Said(BIG)] * MANY)
        assert playing.cancelled.wait(WAIT_S)
        received = bytearray()
        while data := client.recv(1 << 20):
            received += data
        assert not received.endswith(b"0\r\n\r\n"), "an answer cut off must not look complete"
        assert len(received) < MANY * len(BIG)
        assert app.metric('tgi_request_failure{err="dropped"}') == 1
        assert app.services.infer.free_permits == 8


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    with serving(ScriptedBackend(None), stall_s=0.4) as app:
        client, playing = listen(app, receive_buffer=LITTLE)
        playing.say(*[Said(BIG)] * MANY, EOS, script=HELLO)
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):
            received += client.recv(1 << 16)
        assert len(texts(dechunk(bytes(received)))) == MANY + 1


@pytest.mark.fault("TGI#2035")
def test_at_shutdown_running_streams_finish_and_nobody_new_is_let_in(app: App) -> None:
    client, playing = listen(app)
    playing.say("a")
    received = read_until(client, b'"a"')
    app.server.should_exit = True
    while True:
        try:
            socket.create_connection(("127.0.0.1", app.port), timeout=WAIT_S).close()
        except OSError:  # refused, or reset in the very moment
            break
    playing.say("b", EOS, script=HELLO)
    received = read_until(client, b"0\r\n\r\n", received)
    assert texts(dechunk(received)) == ["a", "b", "</s>"]
    assert client.recv(1) == b""
    app.thread.join(WAIT_S)
    assert not app.thread.is_alive()


@pytest.mark.row("B: max_concurrent_requests", "G: 6 overload answers 429 and recovers")
@pytest.mark.parametrize("path", [NATIVE, "/generate", CHAT])
def test_overload_is_a_429_with_retry_after_also_for_streams_and_ends(path: str) -> None:
    with serving(ScriptedBackend(None), max_concurrent_requests=1) as app:
        client, playing = listen(app)
        body = BODIES.get(path, {"inputs": "x"})
        refused = app.post(path, body)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        told = refused.json["error"]["message"] if path == CHAT else refused.json["error"]
        assert (told, refused.json["error_type"]) == ("Model is overloaded", "overloaded")
        playing.say(EOS, script=HELLO)
        read_until(client, b"0\r\n\r\n")
        app.backend.script = Script((Said("a"),), FinishReason.LENGTH)
        assert app.post(path, body).status == 200
        assert app.metric('tgi_request_failure{err="overloaded"}') == 1
        assert app.metric("tgi_request_count") == 3


@pytest.mark.fault("vllm#15041")
def test_two_requests_may_carry_the_same_id(app: App) -> None:
    clients = [listen(app) for _ in range(2)]
    for index, (_, playing) in enumerate(clients):
        playing.say(f"mine {index}", EOS, script=HELLO)
    for index, (client, _) in enumerate(clients):
        assert texts(dechunk(read_until(client, b"0\r\n\r\n"))) == [f"mine {index}", "</s>"]
