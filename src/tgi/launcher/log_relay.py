"""What children write -> our log: a shard's JSON lines are re-emitted at their level with its rank, the router's lines
pass unchanged. Knows no processes."""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tgi.observability.logging import LEVELS, pass_through

logger = logging.getLogger("tgi.launcher")

LAST_LINES = 40
ERROR_PREFIX = "Error: "

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONNECTED = re.compile(r'(?:^|[\s"])Connected(?:"|$)')
_PRETTY_ERROR = re.compile(r"^\S+\s+ERROR .*?\S+\.py:\d+: (.+)$")


class Relay(Protocol):
    """Takes the lines of one child, each method from a thread of its own."""

    reason: str | None  # the line in which the child itself has said why it ends
    last_line: str | None  # of stderr

    def stdout(self, line: str) -> None: ...
    def stderr(self, line: str) -> None: ...
    def last_words(self) -> list[str]:
        """The last lines of stderr, as far as the log does not show them already."""
        ...


class SpanRelay:
    """Lines of a shard or a download, re-emitted under a span: `shard-manager{rank=0}: …`."""

    def __init__(self, span: dict[str, Any]) -> None:
        self._span = span
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.reason: str | None = None
        self.last_line: str | None = None

    def stdout(self, line: str) -> None:
        """A loguru JSON line at its own level; any other line as it is, at info."""
        level, text = read_loguru_line(line) or (logging.INFO, line)
        if level >= logging.ERROR and text.startswith(ERROR_PREFIX):
            self.reason = text.splitlines()[0].removeprefix(ERROR_PREFIX)
            if self.reason == text.removeprefix(ERROR_PREFIX):
                return  # the launcher's own last line will tell it
        if text.strip():
            self._emit(level, text)

    def stderr(self, line: str) -> None:
        """Of interest only when the child dies; shown before that at debug."""
        if line.startswith(ERROR_PREFIX):
            self.reason = line.removeprefix(ERROR_PREFIX)
        elif line.strip():
            self._last_lines.append(line)
            self.last_line = line.strip()
            self._emit(logging.DEBUG, line)

    def last_words(self) -> list[str]:
        return list(self._last_lines)

    def _emit(self, level: int, text: str) -> None:
        logger.log(level, "%s", text, extra={"span": self._span})


class RouterRelay:
    """The router's lines, unchanged. Calls `on_connected` after the line that says it is listening."""

    def __init__(self, on_connected: Callable[[], None]) -> None:
        self._on_connected = on_connected
        self._is_connected = False
        self._held: str | None = None  # an error line of the start: if it was the last, the launcher's own tells it
        self.reason: str | None = None
        self.last_line: str | None = None

    def stdout(self, line: str) -> None:
        if self._held is not None:
            pass_through(self._held)
            self._held = None
        if not self._is_connected and (error := read_error_line(line)) is not None:
            self.reason = error
            if r"\n" not in line:  # as JSON it may bring a traceback along
                self._held = line
                return
        pass_through(line)
        if is_connected_line(line):
            self._is_connected = True  # from here on an error is one request's, and no reason for the end
            self._on_connected()

    def stderr(self, line: str) -> None:
        if line.startswith(ERROR_PREFIX):
            self.reason = line.removeprefix(ERROR_PREFIX)  # the launcher's own last line will tell it
        else:
            self.last_line = line.strip() or self.last_line
            pass_through(line)

    def last_words(self) -> list[str]:
        return []


def read_error_line(line: str) -> str | None:
    """The message of a line of the router's log, pretty or JSON, if its level is ERROR."""
    if line.startswith("{"):
        try:
            entry = json.loads(line)
        except ValueError:
            return None
        message = entry.get("message")
        return (
            message.splitlines()[0] if entry.get("level") == "ERROR" and isinstance(message, str) and message else None
        )
    found = _PRETTY_ERROR.match(_COLOURS.sub("", line))
    return found.group(1) if found else None


def read_loguru_line(line: str) -> tuple[int, str] | None:
    """(level, text) of a line in loguru's serialised shape, else None."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
        text, name = entry["text"], entry["record"]["level"]["name"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(text, str) or not isinstance(name, str):
        return None
    level = LEVELS.get(name.lower(), logging.INFO)
    return min(level, logging.ERROR), text.rstrip("\n")


def is_connected_line(line: str) -> bool:
    """Is this the line that scripts wait for, pretty or JSON? A message that merely contains the word is not."""
    return _CONNECTED.search(_COLOURS.sub("", line)) is not None
