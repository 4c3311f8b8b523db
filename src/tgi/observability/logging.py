"""Log lines in TGI's shapes: router and launcher (pretty or JSON), shard (message only, or loguru's JSON).

stdlib logging only; everything goes to stdout, one write per line. Knows no flag and no environment: callers hand in
the level's text, the colour choice and the secrets that must never appear.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

Program = Literal["launcher", "router", "shard"]

TRACE = 5
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "success": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}
MASK = "***"
_PACKAGE_PREFIX = f"{Path(__file__).resolve().parent.parent}{os.sep}"
# Replacing every occurrence of a shorter secret would make the log unreadable; callers mask those where they print.
SHORTEST_SECRET = 6

_COLOURS = {"TRACE": "35", "DEBUG": "34", "INFO": "32", "WARN": "33", "ERROR": "31"}
_ICONS = {"TRACE": "✏️", "DEBUG": "🐞", "INFO": "ℹ️", "WARNING": "⚠️", "ERROR": "❌", "CRITICAL": "☠️"}

logging.addLevelName(TRACE, "TRACE")


def setup_logging(
    program: Program,
    level: str = "info",
    json_output: bool = False,
    *,
    colorize: bool | None = None,
    secrets: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Send the log of this process to `stream` (stdout) in the shape of `program`.

    `level` is a word, or a comma list of `target=level` directives; one that cannot be read is ignored with a warning.
    `colorize` None: colours on a terminal only. Each of `secrets` is masked wherever it would appear. A record may
    carry `extra={"fields": {...}, "span": {"name": ..., ...}}`. May be called again: the last call holds.
    """
    output = stream or sys.stdout
    handler = _LineHandler(output, secrets)
    handler.setFormatter(_formatter(program, json_output, output.isatty() if colorize is None else colorize))
    root = logging.getLogger()
    for previous in [handler for handler in root.handlers if isinstance(handler, _LineHandler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    levels, unreadable = read_levels(level)
    for name, number in levels.items():
        logging.getLogger(name).setLevel(number)
    for directive in unreadable:
        logging.getLogger(__name__).warning("Ignoring %r in LOG_LEVEL: it is no level and no target=level", directive)


def pass_through(line: str) -> None:
    """Write a line that another process has formatted already: unchanged but for secrets, and never inside one of
    ours."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _LineHandler):
            handler.write_line(line)


def read_levels(text: str) -> tuple[dict[str, int], list[str]]:
    """(logger name -> level, directives that cannot be read) of a LOG_LEVEL text. A bare word speaks of our own
    programs only, as TGI's `info`, `warn` and `debug` do; "tgi" is always among the names."""
    levels = {"tgi": logging.INFO}
    unreadable: list[str] = []
    for directive in filter(None, (part.strip() for part in text.split(","))):
        target, _, word = directive.rpartition("=")
        number = LEVELS.get(word.strip().lower())
        if number is None:
            unreadable.append(directive)
        else:
            levels[_logger_name(target.strip()) if target.strip() else "tgi"] = number
    return levels, unreadable


def finest_level(text: str) -> str:
    """The most talkative level of a LOG_LEVEL text, as loguru names it: the shards' `--logger-level`."""
    number = min(read_levels(text)[0].values())
    return next(
        (name for name in ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR") if LEVELS[name.lower()] >= number), "CRITICAL"
    )


def mask(text: str, secrets: Sequence[str]) -> str:
    """`text` without the secrets, however JSON would have escaped them."""
    for secret in secrets:
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, MASK).replace(json.dumps(secret)[1:-1], MASK)
    return text


def _formatter(program: Program, json_output: bool, colorize: bool) -> logging.Formatter:
    if program == "shard":
        return _LoguruJson() if json_output else logging.Formatter("%(message)s")
    if json_output:
        return _TracingJson(nested=program == "launcher")
    return _TracingText(colorize)


class _LineHandler(logging.StreamHandler[TextIO]):
    """A StreamHandler that keeps quiet when nobody reads any more: the launcher may be gone before its children."""

    def __init__(self, stream: TextIO, secrets: Sequence[str]) -> None:
        super().__init__(stream)
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record), self._secrets)

    def write_line(self, line: str) -> None:
        with self.lock or contextlib.nullcontext(), contextlib.suppress(OSError):
            self.stream.write(mask(line, self._secrets) + self.terminator)
            self.flush()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _TracingText(logging.Formatter):
    """`2026-11-29T22:50:00.123456Z  INFO span{field=1}: target: file:line: message field=2`"""

    def __init__(self, colorize: bool) -> None:
        super().__init__()
        self._colorize = colorize

    def format(self, record: logging.LogRecord) -> str:
        level = _level_name(record)
        padded = f"{level:>5}"
        if self._colorize:
            padded = f"\x1b[{_COLOURS[level]}m{padded}\x1b[0m"
        where = f"{_target(record)}: {_file(record)}:{record.lineno}: "
        if self._colorize:
            where = f"\x1b[2m{where}\x1b[0m"
        fields = _pairs(_extra(record, "fields"))
        message = record.getMessage() + (f" {fields}" if fields else "")
        line = f"{_timestamp(record)} {padded} {_span_text(record)}{where}{message}"
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


class _TracingJson(logging.Formatter):
    """One object per line. The launcher nests the event's fields under `fields`, the router has them at the top."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self._nested = nested

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {"message": record.getMessage(), **_extra(record, "fields")}
        trace = _trace(self, record)
        if trace:
            event["exception"] = trace
        line: dict[str, Any] = {"timestamp": _timestamp(record), "level": _level_name(record)}
        line |= {"fields": event} if self._nested else event
        line |= {"target": _target(record), "filename": _file(record), "line_number": record.lineno}
        span = _extra(record, "span")
        if span:
            line |= {"span": span, "spans": [span]}
        return json.dumps(line, ensure_ascii=False, default=str)


class _LoguruJson(logging.Formatter):
    """The shape that loguru's `serialize` gives, which TGI's launcher expects from its shards."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        trace = _trace(self, record)
        exception = None
        if record.exc_info and record.exc_info[0] is not None:
            exception = {"type": record.exc_info[0].__name__, "value": str(record.exc_info[1]), "traceback": True}
        moment = datetime.fromtimestamp(record.created, UTC)
        body = {
            "elapsed": {"repr": f"{record.relativeCreated / 1000:.6f}", "seconds": record.relativeCreated / 1000},
            "exception": exception,
            "extra": _extra(record, "fields"),
            "file": {"name": record.filename, "path": record.pathname},
            "function": record.funcName,
            "level": {"icon": _ICONS.get(record.levelname, ""), "name": record.levelname, "no": record.levelno},
            "line": record.lineno,
            "message": message,
            "module": record.module,
            "name": record.name,
            "process": {"id": record.process, "name": record.processName},
            "thread": {"id": record.thread, "name": record.threadName},
            "time": {"repr": moment.isoformat(sep=" "), "timestamp": record.created},
        }
        text = f"{message}\n{trace}\n" if trace else f"{message}\n"
        return json.dumps({"text": text, "record": body}, ensure_ascii=False, default=str)


def _level_name(record: logging.LogRecord) -> str:
    """TGI's words: TRACE, DEBUG, INFO, WARN, ERROR."""
    for name, number in (("ERROR", logging.ERROR), ("WARN", logging.WARNING), ("INFO", logging.INFO)):
        if record.levelno >= number:
            return name
    return "DEBUG" if record.levelno >= logging.DEBUG else "TRACE"


def _target(record: logging.LogRecord) -> str:
    """`tgi.router.app` as TGI's tools know it: `text_generation_router::app`."""
    name = record.name
    for program in ("launcher", "router", "server"):
        ours = f"tgi.{program}"
        if name == ours or name.startswith(ours + "."):
            name = f"text_generation_{program}{name[len(ours) :]}"
    return name.replace(".", "::")


def _logger_name(target: str) -> str:
    """The reverse of `_target`."""
    return target.replace("::", ".").replace("text_generation_", "tgi.", 1)


def _file(record: logging.LogRecord) -> str:
    # By the package's own place: a checkout may lie in a folder of any name, of this one too.
    inside = record.pathname.startswith(_PACKAGE_PREFIX)
    return f"tgi/{record.pathname.removeprefix(_PACKAGE_PREFIX)}" if inside else record.filename


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _extra(record: logging.LogRecord, name: str) -> dict[str, Any]:
    value = getattr(record, name, None)
    return value if isinstance(value, dict) else {}


def _span_text(record: logging.LogRecord) -> str:
    span = _extra(record, "span")
    if not span:
        return ""
    fields = _pairs({key: value for key, value in span.items() if key != "name"})
    return f"{span.get('name', '')}{{{fields}}}: "


def _pairs(fields: dict[str, Any]) -> str:
    return " ".join(f"{key}={json.dumps(value, default=str, ensure_ascii=False)}" for key, value in fields.items())


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
