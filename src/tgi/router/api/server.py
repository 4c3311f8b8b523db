"""uvicorn as we need it: a way to cut a connection, a call when it listens, and signals left to the program."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tgi.router.api.sse import ABORT

IDLE_CONNECTION_S = 75
"""Longer than clients keep theirs, so that none is reused at the moment it is closed."""


class Protocol(HttpToolsProtocol):
    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions


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
