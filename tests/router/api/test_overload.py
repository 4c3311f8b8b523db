"""Too many requests, or one that waited for too long: 429 with Retry-After, on every route that generates."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.app import serving
from tests.fakes.backend import Script, ScriptedBackend
from tgi.errors import Overloaded
from tgi.router.app import table

ROWS = table(kserve_routes=True)
CHAT = [{"role": "user", "content": "Hi"}]
TENSOR = {"name": "in", "datatype": "BYTES", "shape": [1], "data": ["x"]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/", {"inputs": "x"}),
    ("/", {"inputs": "x", "stream": True}),
    ("/generate", {"inputs": "x"}),
    ("/generate_stream", {"inputs": "x"}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": "x", "stream": True}),
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/responses", {"input": "x", "stream": True}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 5}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 5, "stream": True}),
    ("/invocations", {"inputs": "x"}),
    ("/vertex", {"instances": [{"inputs": "x"}]}),
    ("/v2/models/m/infer", {"inputs": [TENSOR]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_without_a_permit(path: str, body: dict[str, Any]) -> None:
    with serving(ScriptedBackend(None), rows=ROWS, max_concurrent_requests=1) as app:
        app.open("/generate", {"inputs": "x"})
        app.backend.next_playing()
        answer = app.post(path, body)
        assert (answer.status, answer.headers.get("retry-after")) == (429, "1")
        assert len(app.backend.requests) == 1


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_after_the_queue_timeout(path: str, body: dict[str, Any]) -> None:
    """Nothing of a stream has been sent by then, so its status can still tell."""
    error = Overloaded("the request waited in the queue for more than 2 s", retry_after_s=3)
    with serving(ScriptedBackend(Script((), error=error)), rows=ROWS) as app:
        answer = app.post(path, body)
        assert (answer.status, answer.headers.get("retry-after")) == (429, "3")
        assert b"waited in the queue for more than 2 s" in answer.body
