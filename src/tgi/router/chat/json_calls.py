"""Reads calls that are JSON objects, {"name": …, "arguments": {…}} and what models make of it. Knows no marks."""

from __future__ import annotations

import json

from tgi.router.chat.reader import Reader, Reading

NAME_KEYS = ("name", "_name")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id", "index")
"""Members that say nothing. `description` is not among them: an object with it tells of a tool, it does not call it."""


def read_calls(reader: Reader, bare: bool) -> Reading[bool]:
    """One object, several, or a list of them. True if all that was there are calls.

    `bare`: no mark says that this is a call, so it must name a tool of the request and hold no strange member.
    """
    in_list = yield from reader.take("[")
    found = False
    while True:
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            break
        if not (yield from _ObjectReader(reader, bare).read()):
            return False
        found = True
        reader.commit()
        yield from reader.skip_space()
        if (yield from reader.peek()) in (",", ";"):
            yield from reader.take((yield from reader.peek()))
    if found and in_list and (yield from reader.take("]")):
        reader.commit()
    return found


class _ObjectReader:
    """One object. The call begins as soon as its name is known and its arguments have begun."""

    __slots__ = ("_arguments", "_bare", "_begun", "_name", "_reader")

    def __init__(self, reader: Reader, bare: bool) -> None:
        self._reader = reader
        self._bare = bare
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name
        self._begun = False

    def read(self) -> Reading[bool]:
        """False where the object is no call, or breaks off: what was begun stays."""
        reader = self._reader
        yield from reader.take("{")
        if not (yield from self._members(is_nested=False)):
            if self._begun and reader.ended:
                reader.drop_rest()
            return False
        if self._begun:
            return True
        if self._name is None:
            return False
        reader.call(self._name, self._arguments or "{}")
        return True

    def _members(self, is_nested: bool) -> Reading[bool]:
        """All members of an object whose brace was taken, and its end."""
        reader = self._reader
        while True:
            yield from reader.skip_space()
            key = yield from reader.string()
            if key is None:
                return False
            yield from reader.skip_space()
            if not (yield from reader.take(":")):
                return False
            yield from reader.skip_space()
            if not (yield from self._member(key, is_nested)):
                return False
            if key == "_name" and self._begun:
                return True  # the rest of that object was the arguments
            yield from reader.skip_space()
            if (yield from reader.take("}")):
                return True
            if not (yield from reader.take(",")):
                return False

    def _member(self, key: str, is_nested: bool) -> Reading[bool]:
        if key in NAME_KEYS and self._name is None:
            if not (yield from self._take_name()):
                return False
            return (yield from self._flat_arguments()) if key == "_name" else True
        if key in ARGUMENT_KEYS and not self._begun and self._arguments is None:
            return (yield from self._take_arguments())
        if key == "function" and not is_nested:
            if (yield from self._reader.take("{")):
                return (yield from self._members(is_nested=True))
            if self._name is None:
                return (yield from self._take_name())
        if self._bare and key not in OTHER_KEYS:
            return False
        return (yield from self._reader.json())

    def _take_name(self) -> Reading[bool]:
        name = yield from self._reader.string()
        if not name or (self._bare and name not in self._reader.tools):
            return False
        self._name = name
        return True

    def _flat_arguments(self) -> Reading[bool]:
        """TGI's own grammar made {"_name": …, "a": 1}: the other members are the arguments."""
        reader = self._reader
        assert self._name is not None
        yield from reader.skip_space()
        if not (yield from reader.take(",")):
            if not (yield from reader.take("}")):
                return False
            reader.call(self._name, "{}")
        else:
            reader.call(self._name, "{")
            if not (yield from reader.json(reader.arguments, opened="{")):
                return False
        self._begun = True
        return True

    def _take_arguments(self) -> Reading[bool]:
        reader = self._reader
        first = yield from reader.peek()
        if first == "{" and self._name is not None:
            self._begun = True
            reader.begin(self._name)
            return (yield from reader.json(reader.arguments))
        if first == '"':
            return self._keep((yield from reader.string()))
        if first not in ("{", "n"):
            return False
        raw: list[str] = []
        complete = yield from reader.json(raw.append)
        return complete and self._keep("".join(raw))

    def _keep(self, arguments: str | None) -> bool:
        """Arguments that are to be told when the object is complete: JSON in a string is taken out of it."""
        if arguments is None:
            return False
        if arguments.strip() in ("", "null"):
            arguments = "{}"
        try:
            is_object = isinstance(json.loads(arguments, strict=False), dict)
        except (ValueError, RecursionError):
            is_object = False
        self._arguments = arguments
        return is_object
