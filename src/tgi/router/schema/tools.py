"""Wire types of tools in requests, in OpenAI's shapes and TGI's: what clients send, read leniently.

`chat/tools.py` decides what of it is legal.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: Any = None  # a JSON schema; absent: the function takes nothing
    arguments: Any = None  # TGI's other name for `parameters`; a JSON text there, too
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    type: str = "function"
    function: FunctionDefinition


class FunctionName(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True, kw_only=True):
    type: str = "function"
    function: FunctionName


ToolChoice = str | NamedTool
"""`auto`, `none`, `required`, a function's name (TGI), or OpenAI's object."""
