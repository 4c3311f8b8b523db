"""Exchanges with Text Generation Inference, request by request: status, headers, keys and their order, texts.

Each JSON file is a list of exchanges: `request` (method, path, headers, body as JSON or `raw` text) and `response`
(status, headers, and one of: `json`, `text`, `events` of a stream). In a response "<int>", "<number>", "<string>" and
"<id>" stand for any such value; everything else must be equal, key order included. The model says "Hello", " world",
and ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.app import App, serving

FILES = sorted(Path(__file__).parent.glob("*.json"))
EXCHANGES = [
    pytest.param(exchange, id=f"{file.stem}-{exchange['name']}")
    for file in FILES
    for exchange in json.loads(file.read_text())
]
WILD = {
    "<int>": lambda value: type(value) is int,
    "<number>": lambda value: type(value) in (int, float),
    "<string>": lambda value: type(value) is str,
    "<id>": lambda value: type(value) is str and re.fullmatch(r"[a-z]+-[0-9a-f]{24}", value),
}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchange(app: App, exchange: dict[str, Any]) -> None:
    request, expected = exchange["request"], exchange["response"]
    raw = request["raw"].encode() if "raw" in request else None
    answer = app.request(request["method"], request["path"], request.get("body"), request.get("headers"), raw)
    assert answer.status == expected["status"], answer.body
    for name, value in expected.get("headers", {}).items():
        assert name in answer.headers, answer.headers
        assert re.fullmatch(value, answer.headers[name]), (name, answer.headers[name])
    for name in expected.get("absent_headers", ()):
        assert name not in answer.headers
    if "json" in expected:
        assert_like(answer.json, expected["json"])
    elif "events" in expected:
        events = [event if event == b"[DONE]" else json.loads(event) for event in answer.events]
        wanted = [b"[DONE]" if event == "[DONE]" else event for event in expected["events"]]
        assert len(events) == len(wanted), events
        for event, want in zip(events, wanted):
            assert_like(event, want)
    else:
        assert answer.body.decode() == expected["text"]


def assert_like(value: Any, wanted: Any, where: str = "$") -> None:
    if isinstance(wanted, str) and wanted in WILD:
        assert WILD[wanted](value), f"{where}: {value!r} is no {wanted}"
    elif isinstance(wanted, dict):
        assert isinstance(value, dict), f"{where}: {value!r}"
        assert list(value) == list(wanted), f"{where}: keys {list(value)}"
        for key in wanted:
            assert_like(value[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(value, list), f"{where}: {value!r}"
        assert len(value) == len(wanted), f"{where}: {value!r}"
        for index, want in enumerate(wanted):
            assert_like(value[index], want, f"{where}[{index}]")
    else:
        assert value == wanted, where
        assert type(value) is type(wanted), where
