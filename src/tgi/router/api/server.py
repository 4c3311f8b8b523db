"""uvicorn as we need it: heads of bounded size, upgrades declined, a way to cut a connection, a call when it listens,
and signals left to the program."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tgi.router.api.sse import ABORT

IDLE_CONNECTION_S = 75
"""Longer than clients keep theirs, so that none is reused at the moment it is closed."""


MAX_HEAD = 400 * 1024
"""Bytes of a request's fields, before its body and again behind it. The parser alone would collect them without end."""

_TOO_LARGE = b"Request header fields too large"
_REFUSED = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
)


class Protocol(HttpToolsProtocol):
    """One connection.

    A request that asks for another protocol is served as if it had not asked (RFC 9110, 7.8): Java's HttpClient asks
    for h2c, also with a body. httptools ends such a message at its head and so loses the body; therefore the head is
    given to a new parser without the wish.
    """

    _fields_size: int | None = None  # bytes read since a head or trailers began; None elsewhere
    _is_in_trailers = False

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        left = data
        while left:
            try:
                self.parser.feed_data(left)
                left = b""
            except httptools.HttpParserUpgrade as wish:
                left = self._head_without_wish() + left[wish.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets its own
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("Invalid HTTP request received.")
                return
        if self._fields_size is not None:
            self._fields_size += len(data)
            if self._fields_size > MAX_HEAD:
                self.transport.write(_REFUSED)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._fields_size = 0
        self._is_in_trailers = False
        extensions: dict[str, Any] = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_trailers:  # which uvicorn would mix into the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._fields_size = None
        if not self.parser.should_upgrade():
            super().on_headers_complete()
        elif self.parser.get_method() == b"CONNECT":  # which nothing can be left out of
            raise httptools.HttpParserInvalidMethodError("CONNECT")

    def on_chunk_header(self) -> None:
        """Either data follows, or this is the last chunk and trailers may follow."""
        self._fields_size = 0
        self._is_in_trailers = True

    def on_body(self, body: bytes) -> None:
        self._fields_size = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fields_size = None
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _head_without_wish(self) -> bytes:
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return line + b"".join(fields) + b"\r\n"


class Server(uvicorn.Server):
    """Serves an application on a bound socket until told to exit; then lets running requests finish."""

    def __init__(self, app: ASGIApp, on_listening: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=IDLE_CONNECTION_S,
            )
        )
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """main.py owns the signals: uvicorn would raise them again at the end, and the exit code would not be 0."""
        yield
