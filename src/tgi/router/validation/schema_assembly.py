"""Definitions with references between them -> one JSON schema of what can be satisfied. Knows no keywords but ours.

What cannot be satisfied is found from below: a definition can be, once enough of what it needs can be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

from tgi.router.validation.schema_site import Refused

PREFIX = "#/$defs/"

# A blank or two, or a new line and its indent: enough for pretty JSON, and nothing that a small model can repeat.
WHITESPACE = r"\x20{1,2}|\n[\x20\t]{0,40}"

Node: TypeAlias = "dict[str, Any] | bool"


def any_of(options: list[Node]) -> Node:
    """False where there is none."""
    if len(options) > 1:
        return {"anyOf": options}
    return options[0] if options else False


def assembled(nodes: dict[str, Node], root: str) -> dict[str, Any]:
    """`nodes` by name, `root` among them, refer to each other. Raises Refused where nothing can satisfy the root."""
    alive = _satisfiable(nodes)
    if root not in alive:
        raise Refused("no value satisfies the schema")
    inlined, renamed = _leaves(nodes, alive)

    def kept(node: Any) -> Any:
        """`node` with references to leaves replaced by these, and to what cannot be satisfied by False."""
        if isinstance(node, bool):
            return node
        if "$ref" in node:
            name: str = node["$ref"].removeprefix(PREFIX)
            if name not in alive:
                return False
            return inlined[name] if name in inlined else {"$ref": PREFIX + renamed.get(name, name)}
        if "anyOf" in node:
            return any_of([kept(part) for part in node["anyOf"] if _lives(part, alive)])
        changed = dict(node)
        for keyword in ("items", "additionalProperties"):
            if keyword in node:
                changed[keyword] = kept(node[keyword])
        if "prefixItems" in node:
            changed["prefixItems"] = [kept(item) for item in node["prefixItems"]]
        for keyword in ("properties", "patternProperties"):
            if keyword in node:
                changed[keyword] = {name: kept(value) for name, value in node[keyword].items()}
        return changed

    top = kept(nodes[root])
    assert isinstance(top, dict)
    result = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **top}
    definitions: dict[str, Any] = {}
    waiting = [top]
    while waiting:
        for name in _referenced(waiting.pop()):
            if name not in definitions:
                definitions[name] = kept(nodes[name])
                waiting.append(definitions[name])
    return result | {"$defs": definitions} if definitions else result


def _leaves(nodes: dict[str, Node], alive: set[str]) -> tuple[dict[str, Node], dict[str, str]]:
    """Nodes without arrays and objects: -> those to be written out, and the names under which others are shared.

    Numbers are shared: a range is a long regular expression, a millisecond each time it is compiled.
    """
    inlined: dict[str, Node] = {}
    renamed: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in nodes:
        if name not in alive:
            continue
        node = nodes[name]
        if _is_plain(node):
            if _has_numbers(node):
                renamed[name] = first.setdefault(json.dumps(node), name)
            else:
                inlined[name] = node
    return inlined, renamed


def _satisfiable(nodes: dict[str, Node]) -> set[str]:
    alive: set[str] = set()
    waiting = list(nodes)
    while True:
        # Last first: a definition is found after those that name it, mostly.
        left = []
        for name in reversed(waiting):
            if _lives(nodes[name], alive):
                alive.add(name)
            else:
                left.append(name)
        if len(left) == len(waiting):
            return alive
        waiting = left[::-1]


def _lives(node: Any, alive: set[str]) -> bool:
    """Can `node` be satisfied, if of all definitions only those in `alive` can be?"""
    if isinstance(node, bool):
        return node
    if "$ref" in node:
        return node["$ref"].removeprefix(PREFIX) in alive
    if "anyOf" in node:
        return any(_lives(part, alive) for part in node["anyOf"])
    if node.get("type") == "array":
        needed = node.get("minItems", 0)
        prefix = node.get("prefixItems", [])
        if not all(_lives(item, alive) for item in prefix[:needed]):
            return False
        return needed <= len(prefix) or _lives(node["items"], alive)
    if node.get("type") == "object":
        properties = node.get("properties", {})
        if not all(_lives(properties.get(name, True), alive) for name in node.get("required", ())):
            return False
        return node.get("minProperties", 0) <= len(node.get("required", ())) or _has_more(node, alive)
    return True


def _has_more(node: dict[str, Any], alive: set[str]) -> bool:
    optional = [value for name, value in node.get("properties", {}).items() if name not in node.get("required", ())]
    others = [node["additionalProperties"], *node.get("patternProperties", {}).values(), *optional]
    return any(_lives(value, alive) for value in others)


def _is_plain(node: Any) -> bool:
    if isinstance(node, bool):
        return True
    if "anyOf" in node:
        return all(_is_plain(part) for part in node["anyOf"])
    return "$ref" not in node and node.get("type") not in ("array", "object")


def _has_numbers(node: Any) -> bool:
    if isinstance(node, bool):
        return False
    return any(map(_has_numbers, node.get("anyOf", ()))) or node.get("type") in ("integer", "number")


def _referenced(node: Any) -> Iterator[str]:
    """The definitions that a node names."""
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        yield node["$ref"].removeprefix(PREFIX)
    for keyword in ("properties", "patternProperties"):
        for value in node.get(keyword, {}).values():
            yield from _referenced(value)
    for keyword in ("anyOf", "prefixItems"):
        for value in node.get(keyword, ()):
            yield from _referenced(value)
    for keyword in ("items", "additionalProperties"):
        yield from _referenced(node.get(keyword))
