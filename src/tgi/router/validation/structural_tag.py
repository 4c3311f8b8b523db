"""vLLM's structural tags as a Lark grammar: free text in which a trigger begins a span that holds to a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tgi.errors import InvalidRequest

MAX_STRUCTURES = 128


def structural_tag_grammar(value: Any, param: str, prepare: Callable[[Any, str], str]) -> str:
    """`value`: {"structures": [{"begin", "schema", "end"}], "triggers": [text]}, or JSON text of it.

    `prepare` makes a schema enforceable. Raises InvalidRequest.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"`{param}` is no JSON: {error}", param) from None
    structures, triggers = _parts(value, param)
    rules = []
    for number, structure in enumerate(structures):
        begin = structure["begin"]
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise InvalidRequest(f"`{param}` has no trigger that {begin!r} begins with", param)
        schema = prepare(structure["schema"], param)
        rules.append(f"trigger_{number}[lazy]: TEXT {_literal(trigger)}")
        head, tail = _literal(begin[len(trigger) :]), _literal(structure["end"])
        rules.append(f"tag_{number}: trigger_{number} {head} %json {schema} {tail}")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({tags})* rest", "rest: TEXT", "TEXT: /(?s:.*)/", *rules, ""])


def _parts(value: Any, param: str) -> tuple[list[dict[str, Any]], list[str]]:
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if (
        not isinstance(structures, list)
        or not 0 < len(structures) <= MAX_STRUCTURES
        or not all(map(_is_structure, structures))
        or not isinstance(triggers, list)
        or not all(isinstance(text, str) and text for text in triggers)
    ):
        raise InvalidRequest(
            f"`{param}` must be an object with `triggers`, a list of texts, and `structures`, up to {MAX_STRUCTURES} "
            "objects with `begin`, `schema` and `end`",
            param,
        )
    return structures, triggers


def _is_structure(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("begin"), str)
        and isinstance(value.get("end"), str)
        and value.get("schema") is not None
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
