"""Calls written as Python, `f(city="Oslo", days=2)` -> names and JSON arguments. The code is parsed, never run."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

from tgi.router.chat.reader import Schemas

MAX_CODE = 16_384
"""Characters. Longer code is no call: parsing it would hold up others."""


def read_python_calls(code: str, tools: Schemas) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each statement; None unless every one is a call with literal arguments, or a list
    of such. `print(f(…))` counts as `f(…)`. Positional arguments are named by the order of the tool's parameters.
    """
    if len(code) > MAX_CODE:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            statements = ast.parse(code.strip()).body
        return [_read_call(call, tools) for statement in statements for call in _calls_in(statement)] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _calls_in(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError("no expression")
    value = statement.value
    return value.elts if isinstance(value, ast.List) else [value]


def _read_call(call: ast.expr, tools: Schemas) -> tuple[str, str]:
    """Raises ValueError for whatever is no call."""
    if _name_of(call) == "print" and isinstance(call, ast.Call) and len(call.args) == 1 and not call.keywords:
        call = call.args[0]
    name = _name_of(call)
    if not isinstance(call, ast.Call) or name in (None, "print"):
        raise ValueError("no call")
    names = list((tools.get(name) or {}).get("properties") or {})
    if len(call.args) > len(names):
        raise ValueError("arguments without a name")
    given: dict[str, Any] = dict(zip(names, map(ast.literal_eval, call.args)))
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("unnamed keywords")
        given[keyword.arg] = ast.literal_eval(keyword.value)
    return name, json.dumps(given, ensure_ascii=False, allow_nan=False)


def _name_of(node: ast.expr | None) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return ast.unparse(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else None
