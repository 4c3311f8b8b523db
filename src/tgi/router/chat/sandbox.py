"""The Jinja environment that authors of chat templates expect, that of transformers, and a bounded run of a template.

A template is foreign code over texts of users: it reaches nothing outside, changes nothing that it was given, and ends.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

TIME_LIMIT_S = 10.0
"""A thread cannot be stopped from outside: loops over loops over a long chat would hold it for hours."""

MAX_CHARACTERS = 16_000_000
BATCH = 256  # pieces of output between two looks at the bounds


class Sandbox(ImmutableSandboxedEnvironment):
    """Looks at the clock wherever a template reads a field or calls something: no useful loop does neither."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        _clock.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _clock.check()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _clock.check()
        return super().call(context, obj, *args, **kwargs)


def new_sandbox() -> Sandbox:
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return sandbox


def run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The whole output. Raises what the template raises, and TemplateError where it passes a bound."""
    _clock.deadline = time.perf_counter() + TIME_LIMIT_S
    try:
        return "".join(_bounded(template.generate(variables)))
    finally:
        _clock.deadline = math.inf


def _bounded(pieces: Iterator[str]) -> list[str]:
    written: list[str] = []
    room = MAX_CHARACTERS
    while batch := list(islice(pieces, BATCH)):
        _clock.check()
        written += batch
        room -= sum(map(len, batch))
        if room < 0:
            raise jinja2.TemplateError(f"the chat template writes more than {MAX_CHARACTERS} characters")
    return written


class _Clock(threading.local):
    deadline = math.inf  # time.perf_counter() of this thread's run

    def check(self) -> None:
        if time.perf_counter() > self.deadline:
            raise jinja2.TemplateError(f"the chat template did not end within {TIME_LIMIT_S:g} s")


_clock = _Clock()


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict(...)` without the class, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Takes no name that begins with an underscore: such an attribute may be the interpreter's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named parameter: `namespace(self=1)` is legal
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML and sorts keys; models were trained on neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
