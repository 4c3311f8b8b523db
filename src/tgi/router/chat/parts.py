"""What an answer is made of, in the order in which it is read: text, thinking text, tool calls. Knows no format."""

from __future__ import annotations

from msgspec import Struct


class Content(Struct, frozen=True):
    text: str


class Reasoning(Struct, frozen=True):
    text: str


class CallBegin(Struct, frozen=True):
    index: int  # of the call in its answer, from 0
    id: str
    name: str


class CallArguments(Struct, frozen=True):
    """A fragment of a call's arguments; all fragments of one index, joined, are its arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments
