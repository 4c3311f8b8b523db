"""Lines of children: levels, spans, pass-through, the line `Connected`, and why a child says that it ends."""

from __future__ import annotations

import json
import logging

import pytest

from tgi.launcher.log_relay import RouterRelay, SpanRelay, is_connected_line, read_error_line, read_loguru_line
from tgi.observability.logging import setup_logging

SPAN = {"name": "shard-manager", "rank": 1}


def loguru(text: str, level: str) -> str:
    return json.dumps({"text": text + "\n", "record": {"level": {"name": level, "no": 20}}})


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("TRACE", 5),
        ("DEBUG", logging.DEBUG),
        ("INFO", logging.INFO),
        ("SUCCESS", logging.INFO),
        ("WARNING", logging.WARNING),
        ("ERROR", logging.ERROR),
        ("CRITICAL", logging.ERROR),
        ("MADE-UP", logging.INFO),
    ],
)
def test_levels_of_loguru(name: str, level: int) -> None:
    assert read_loguru_line(loguru("two\nlines", name)) == (level, "two\nlines")


@pytest.mark.parametrize(
    "line",
    [
        "plain",
        "",
        "{",
        "{}",
        '{"text": "x"}',
        '{"text": 3, "record": {"level": {"name": "INFO"}}}',
        '{"text": "x", "record": 1}',
    ],
)
def test_other_lines_are_not_taken_for_loguru(line: str) -> None:
    assert read_loguru_line(line) is None


def test_a_shards_lines_keep_level_and_rank(caplog: pytest.LogCaptureFixture) -> None:
    relay = SpanRelay(SPAN)
    with caplog.at_level(logging.DEBUG, "tgi.launcher"):
        relay.stdout(loguru("slow", "WARNING"))
        relay.stdout("100 % plain")
        relay.stdout("")
        relay.stderr("a warning of a library")
    shown = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert shown == [("WARNING", "slow"), ("INFO", "100 % plain"), ("DEBUG", "a warning of a library")]
    assert all(getattr(record, "span", None) == SPAN for record in caplog.records)
    assert relay.last_words() == ["a warning of a library"]
    assert relay.last_line == "a warning of a library"
    assert relay.reason is None


def test_the_line_that_says_why_is_kept_for_the_end(caplog: pytest.LogCaptureFixture) -> None:
    relay = SpanRelay(SPAN)
    with caplog.at_level(logging.DEBUG, "tgi.launcher"):
        relay.stdout(loguru("Error: no such file", "ERROR"))
    assert relay.reason == "no such file"
    assert caplog.records == []
    relay.stderr("Error: no such directory")
    assert relay.reason == "no such directory"


def test_a_traceback_is_shown_and_its_first_line_kept(caplog: pytest.LogCaptureFixture) -> None:
    relay = SpanRelay(SPAN)
    text = "Error: it failed\nTraceback (most recent call last):\n  boom"
    relay.stdout(loguru(text, "ERROR"))
    assert relay.reason == "it failed"
    assert [record.getMessage() for record in caplog.records] == [text]


def test_only_errors_say_why(caplog: pytest.LogCaptureFixture) -> None:
    relay = SpanRelay(SPAN)
    with caplog.at_level(logging.INFO, "tgi.launcher"):
        relay.stdout(loguru("Error: a client wrote this", "INFO"))
    assert relay.reason is None
    assert len(caplog.records) == 1


@pytest.mark.row("F: JSON logs, `Connected` line")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("2026-11-29T22:50:00Z  INFO text_generation_router::main: tgi/router/main.py:9: Connected", True),
        ("2026-11-29T22:50:00Z \x1b[32m INFO\x1b[0m \x1b[2mx: y.py:9: \x1b[0mConnected", True),
        ('{"timestamp": "x", "level": "INFO", "message": "Connected", "target": "t"}', True),
        ('{"level":"INFO","message":"Connected"}', True),
        ("Connected", True),
        ("INFO x: y.py:9: Not Connected yet", False),
        ("INFO x: y.py:9: Disconnected", False),
        ('{"message": "Connected to the hub"}', False),
        ("", False),
    ],
)
def test_connected_line(line: str, expected: bool) -> None:
    assert is_connected_line(line) is expected


def test_the_routers_lines_pass_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("launcher", "error", secrets=["sk-123456"])
    connected: list[str] = []
    relay = RouterRelay(lambda: connected.append(capsys.readouterr().out))
    relay.stdout("\x1b[32m INFO\x1b[0m anything  at all ✓")
    relay.stderr("a warning")
    relay.stderr("Error: said at the end only")
    relay.stdout("key sk-123456")
    relay.stdout("x: Connected")
    assert connected == ["\x1b[32m INFO\x1b[0m anything  at all ✓\na warning\nkey ***\nx: Connected\n"]
    assert relay.reason == "said at the end only"
    assert relay.last_words() == []


def test_the_routers_last_error_of_the_start_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("launcher", "error")
    relay = RouterRelay(lambda: None)
    error = "2026-11-29T22:50:00Z ERROR x: a/b.py:1: why"
    relay.stdout(error)
    assert (capsys.readouterr().out, relay.reason) == ("", "why")
    relay.stdout("  what else there is to say")
    assert capsys.readouterr().out == f"{error}\n  what else there is to say\n"
    with_traceback = '{"level": "ERROR", "message": "why not\\nTraceback"}'
    relay.stdout(with_traceback)
    assert (capsys.readouterr().out, relay.reason) == (f"{with_traceback}\n", "why not")


def test_an_error_while_serving_is_no_reason_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("launcher", "error")
    relay = RouterRelay(lambda: None)
    relay.stdout("x: Connected")
    relay.stdout("2026-11-29T22:50:00Z ERROR x: a/b.py:1: one request failed")
    assert capsys.readouterr().out.endswith("one request failed\n")
    assert relay.reason is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "2026-11-29T22:50:00Z ERROR text_generation_router::cli: tgi/router/cli.py:180: no such: file",
            "no such: file",
        ),
        ("2026-11-29T22:50:00Z \x1b[31mERROR\x1b[0m \x1b[2mx: a/b.py:1: \x1b[0mwhy", "why"),
        ("2026-11-29T22:50:00Z ERROR generate{id=1}: x::y: a/b.py:1: why", "why"),
        ("2026-11-29T22:50:00Z  INFO x: a/b.py:1: ERROR in the text", None),
        ('{"level": "ERROR", "message": "why\\nTraceback"}', "why"),
        ('{"level": "INFO", "message": "why"}', None),
        ('{"level": "ERROR", "message": ""}', None),
        ('{"level": "ERROR"}', None),
        ("{broken", None),
        ("", None),
    ],
)
def test_error_lines_of_the_router(line: str, expected: str | None) -> None:
    assert read_error_line(line) == expected
