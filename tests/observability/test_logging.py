"""Log lines in TGI's shapes, levels, colours, and secrets that never appear."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tgi.observability.logging import finest_level, mask, pass_through, read_levels, setup_logging

SECRET = 'sk-"quoted"-123'


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    names = ("", "tgi", "tgi.router", "hyper", "text_generation_router.x")
    root = logging.getLogger()
    handlers = list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def lines(program: Any, *records: dict[str, Any], **options: Any) -> list[str]:
    """What `program` writes for the given calls of Logger.log."""
    stream = io.StringIO()
    setup_logging(program, stream=stream, **options)
    for record in records:
        logging.getLogger(record.pop("name", "tgi.router.api.generate")).log(
            record.pop("level", logging.INFO), *record.pop("args", ("hello %s", "you")), **record
        )
    return stream.getvalue().splitlines()


@pytest.mark.row("F: JSON logs, `Connected` line")
def test_router_json() -> None:
    (line,) = lines(
        "router", {"extra": {"fields": {"queue": 3}, "span": {"name": "generate", "id": 1}}}, json_output=True
    )
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("Z")
    assert entry.pop("line_number") > 0
    assert entry == {
        "level": "INFO",
        "message": "hello you",
        "queue": 3,
        "target": "text_generation_router::api::generate",
        "filename": "test_logging.py",
        "span": {"name": "generate", "id": 1},
        "spans": [{"name": "generate", "id": 1}],
    }


def test_launcher_json_nests_the_fields() -> None:
    (line,) = lines("launcher", {"name": "tgi.launcher", "extra": {"fields": {"n": 1}}}, json_output=True)
    entry = json.loads(line)
    assert entry["fields"] == {"message": "hello you", "n": 1}
    assert entry["target"] == "text_generation_launcher"
    assert "message" not in entry
    assert "span" not in entry


def test_pretty() -> None:
    extra = {"fields": {"queue": 3}, "span": {"name": "generate", "total_time": "1s"}}
    (line,) = lines("router", {"level": logging.WARNING, "extra": extra})
    moment, rest = line.split(" ", 1)
    assert moment.endswith("Z")
    assert "T" in moment
    assert rest.startswith(' WARN generate{total_time="1s"}: text_generation_router::api::generate: test_logging.py:')
    assert rest.endswith(": hello you queue=3")


@pytest.mark.parametrize(
    ("level", "word"), [(5, "TRACE"), (10, "DEBUG"), (20, "INFO"), (30, "WARN"), (40, "ERROR"), (50, "ERROR")]
)
def test_words_of_levels(level: int, word: str) -> None:
    (line,) = lines("router", {"level": level}, level="trace", json_output=True)
    assert json.loads(line)["level"] == word
    (pretty,) = lines("router", {"level": level}, level="trace")
    assert pretty.split()[1] == word


def test_shard_json_has_the_shape_of_loguru() -> None:
    (line,) = lines("shard", {"name": "tgi.server.serve", "level": logging.WARNING}, json_output=True)
    entry = json.loads(line)
    assert entry["text"] == "hello you\n"
    record = entry["record"]
    assert record["level"] == {"icon": "⚠️", "name": "WARNING", "no": 30}
    assert record["message"] == "hello you"
    assert record["file"]["name"] == "test_logging.py"
    assert {"elapsed", "exception", "extra", "function", "line", "module", "name", "process", "thread", "time"} <= set(
        record
    )


def test_shard_pretty_is_the_message_only() -> None:
    assert lines("shard", {"name": "tgi.server.serve"}) == ["hello you"]


@pytest.mark.parametrize(
    ("program", "json_output"), [("router", True), ("router", False), ("shard", True), ("launcher", True)]
)
def test_exceptions_are_kept(program: str, json_output: bool) -> None:
    stream = io.StringIO()
    setup_logging(program, json_output=json_output, stream=stream)  # pyright: ignore[reportArgumentType]
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("tgi.x").exception("it failed")
    text = stream.getvalue()
    assert "it failed" in text
    assert "ValueError: odd" in text
    assert "Traceback" in text
    assert len(text.splitlines()) == 1 or not json_output
    if program == "shard":
        assert json.loads(text)["record"]["exception"] == {"type": "ValueError", "value": "odd", "traceback": True}


@pytest.mark.parametrize("program", ["router", "launcher", "shard"])
@pytest.mark.parametrize("json_output", [False, True])
def test_secrets_never_appear(program: str, json_output: bool) -> None:
    stream = io.StringIO()
    setup_logging(program, json_output=json_output, secrets=[SECRET], stream=stream)  # pyright: ignore[reportArgumentType]
    extra = {"fields": {"header": f"Bearer {SECRET}"}, "span": {"name": "x", "key": SECRET}}
    logging.getLogger("tgi.x").info("key %s", SECRET, extra=extra)
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger("tgi.x").exception("bad")
    pass_through(f"raw {SECRET}")
    text = stream.getvalue()
    assert "sk-" not in text
    assert "raw ***" in text


def test_mask_leaves_short_words_alone() -> None:
    assert mask("a cat", ["a"]) == "a cat"
    assert mask("secret-1 secret-2", ["secret-1"]) == "*** secret-2"


@pytest.mark.row("C: --env, --json-output, LOG_LEVEL")
@pytest.mark.parametrize(
    ("text", "levels", "unreadable"),
    [
        ("info", {"tgi": 20}, []),
        ("", {"tgi": 20}, []),
        ("WARN", {"tgi": 30}, []),
        ("warning", {"tgi": 30}, []),
        ("debug", {"tgi": 10}, []),
        ("trace", {"tgi": 5}, []),
        ("off", {"tgi": 51}, []),
        ("info,hyper=debug", {"tgi": 20, "hyper": 10}, []),
        ("text_generation_router=debug", {"tgi": 20, "tgi.router": 10}, []),
        ("error, text_generation_router::api=trace", {"tgi": 40, "tgi.router.api": 5}, []),
        ("loud", {"tgi": 20}, ["loud"]),
        ("info,x=loud,[span]", {"tgi": 20}, ["x=loud", "[span]"]),
    ],
)
def test_levels(text: str, levels: dict[str, int], unreadable: list[str]) -> None:
    assert read_levels(text) == (levels, unreadable)


def test_only_our_own_programs_follow_a_bare_level() -> None:
    records = [{"name": "tgi.router"}, {"name": "hyper"}, {"name": "hyper", "level": logging.WARNING}]
    assert len(lines("router", *records)) == 2
    assert len(lines("router", {"name": "tgi.router", "level": logging.DEBUG})) == 0
    assert len(lines("router", {"name": "tgi.router", "level": logging.DEBUG}, level="debug")) == 1


def test_an_unreadable_level_is_a_warning_not_an_end() -> None:
    (line,) = lines("router", level="loud")
    assert " WARN " in line
    assert "Ignoring 'loud' in LOG_LEVEL" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("info", "INFO"),
        ("debug", "DEBUG"),
        ("error,tgi.x=trace", "TRACE"),
        ("warn", "WARNING"),
        ("off", "CRITICAL"),
        ("?", "INFO"),
    ],
)
def test_finest_level(text: str, expected: str) -> None:
    assert finest_level(text) == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "colorize", "expected"),
    [(Terminal(), None, True), (io.StringIO(), None, False), (io.StringIO(), True, True), (Terminal(), False, False)],
)
def test_colours(stream: io.StringIO, colorize: bool | None, expected: bool) -> None:
    setup_logging("router", colorize=colorize, stream=stream)
    logging.getLogger("tgi.router").info("hello")
    assert ("\x1b[32m INFO\x1b[0m" in stream.getvalue()) is expected


def test_setting_up_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("router", stream=first)
    setup_logging("router", stream=second)
    logging.getLogger("tgi.router").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


class Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_a_reader_that_is_gone_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("shard", stream=Broken())
    logging.getLogger("tgi.server").info("nobody reads this")
    pass_through("nor this")
    assert capsys.readouterr().err == ""


def test_a_fault_of_our_own_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("shard", stream=io.StringIO())
    root = logging.getLogger()
    root.handlers[:] = root.handlers[-1:]  # pytest's own would raise
    logging.getLogger("tgi.server").info("%d", "no number")
    assert "Logging error" in capsys.readouterr().err
