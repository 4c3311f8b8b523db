"""The real application on a real socket, over a scripted Backend, and the smallest clients that show exact bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from tests.fakes.backend import WAIT_S, ScriptedBackend
from tests.fakes.tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tgi.observability.metrics import Metrics
from tgi.observability.tracing import open_tracer
from tgi.router.api.server import Server
from tgi.router.api.services import Services
from tgi.router.api.sse import Pulse
from tgi.router.app import ROUTES, Row, create_app
from tgi.router.chat.template import ChatTemplate
from tgi.router.chat.tools import read_tool_template
from tgi.router.infer import Infer
from tgi.router.main import bind
from tgi.router.schema.info import Info
from tgi.router.validation.grammar_checker import GrammarChecker
from tgi.router.validation.parameters import Limits
from tgi.router.validation.validator import Validator
from tgi.text.pool import EncodePool
from tgi.text.tokenizer import Tokenizer

VOCAB_SIZE = 300
SEED = 1234  # what a request without a seed draws


@dataclass
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """Payloads of a stream's events; asserts the framing."""
        return [payload for _, payload in self.named_events]

    @property
    def named_events(self) -> list[tuple[str, bytes]]:
        """Names and payloads; "" for an event without a name."""
        assert self.body.endswith(b"\n\n")
        blocks = [block for block in self.body[:-2].split(b"\n\n") if block != b":"]
        found = [re.fullmatch(rb"(?:event: ([a-z_.]+)\n)?data: ([^\n]*)", block) for block in blocks]
        assert all(found), self.body
        return [((event[1] or b"").decode(), event[2]) for event in found if event]


@dataclass
class App:
    """A running server, seen from outside."""

    port: int
    backend: ScriptedBackend
    services: Services
    server: Server
    thread: threading.Thread
    sockets: list[socket.socket] = field(default_factory=list)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, raw: bytes | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})} if data is not None else (headers or {})
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, raw: bytes | None = None
    ) -> Answer:
        return self.request("POST", path, body, headers, raw)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.request("GET", path, headers=headers)

    def metric(self, series: str) -> float:
        """Value of one series of /metrics, named with its labels."""
        for line in self.get("/metrics").body.decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        raise KeyError(series)

    def open(self, path: str, body: Any, receive_buffer: int | None = None) -> socket.socket:
        """Send a request, leave the answer to the test byte by byte. `receive_buffer`: a client that takes little."""
        client = socket.socket()
        self.sockets.append(client)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(WAIT_S)
        client.connect(("127.0.0.1", self.port))
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        client.sendall(head.encode() + data)
        return client


def read_until(client: socket.socket, mark: bytes, received: bytes = b"") -> bytes:
    """Everything up to where `mark` has come, or the end of the connection."""
    while mark not in received:
        data = client.recv(1 << 16)
        if not data:
            return received
        received += data
    return received


def dechunk(received: bytes) -> bytes:
    """Body of a chunked answer, as far as it has come."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not size or int(size, 16) == 0:
            break
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


@contextlib.contextmanager
def serving(
    backend: ScriptedBackend | None = None,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    max_concurrent_requests: int = 8,
    payload_limit: int = 20_000,
    api_key: str | None = None,
    cors_allow_origin: Sequence[str] = (),
    keep_alive_s: float = 15.0,
    stall_s: float = 60.0,
    limits: Limits | None = None,
    rows: Sequence[Row] = ROUTES,
    tokenizer: Tokenizer | None = None,
    otlp_endpoint: str | None = None,
) -> Iterator[App]:
    """The limits are small: 100 input tokens, 200 in total."""
    tracer = open_tracer(otlp_endpoint, "test-router")
    backend = backend or ScriptedBackend()
    limits = limits or Limits(max_input_tokens=100, max_total_tokens=200, vocab_size=VOCAB_SIZE, prompt_logprobs=True)
    tokenizer = tokenizer or byte_tokenizer(("Hello", " world"), chat_template)
    pool = EncodePool(tokenizer, 1)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    grammars = GrammarChecker(tokenizer)
    validator = Validator(pool, limits, tokenizer.vocab_size, draw_seed=lambda: SEED, grammars=grammars)
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.named_tokens)
    services = Services(
        infer=Infer(backend, validator, metrics, max_concurrent_requests),
        encoder=pool,
        vocabulary=tokenizer,
        template=template,
        tools=read_tool_template(template.source, template.uses_tools, tokenizer.special_tokens),
        metrics=metrics,
        pulse=Pulse(keep_alive_s, stall_s),
        info=_info(limits, max_concurrent_requests),
        system_fingerprint="1.2.3-native",
        compute_type="1-test-device",
        payload_limit=payload_limit,
        compat_return_full_text=True,
        refresh_metrics=lambda: None,
    )
    listening = threading.Event()
    server = Server(create_app(services, api_key, cors_allow_origin, rows, tracer), on_listening=listening.set)
    listener = bind("127.0.0.1", 0)
    # Connections inherit it: a client that does not read makes the server wait soon.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    thread = threading.Thread(target=lambda: uvloop.run(server.serve([listener])), daemon=True)
    thread.start()
    assert listening.wait(WAIT_S)
    app = App(listener.getsockname()[1], backend, services, server, thread)
    try:
        yield app
    finally:
        for client in app.sockets:
            client.close()
        server.should_exit = True
        thread.join(WAIT_S)
        if tracer is not None:
            tracer.close()
        pool.close()
        grammars.close()
        listener.close()
    assert not thread.is_alive(), "the server did not stop"


def _info(limits: Limits, max_concurrent_requests: int) -> Info:
    return Info(
        model_id="test/model",
        model_sha=None,
        model_pipeline_tag=None,
        max_concurrent_requests=max_concurrent_requests,
        max_best_of=limits.max_best_of,
        max_stop_sequences=limits.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=1,
        max_client_batch_size=4,
        router="text-generation-router",
        version="1.2.3",
        sha=None,
        docker_label=None,
    )
