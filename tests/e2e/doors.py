"""The ways to ask a server for text that holds to a JSON schema, and the verdict on what it says.

Knows the shapes of HTTP, and nothing of how a schema is held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jsonschema.validators import Draft202012Validator

from tests.e2e.client import Client
from tests.fakes.grammars import begins
from tests.fakes.tokenizer import byte_tokenizer
from tgi.router.validation.grammar_checker import Engine
from tgi.shard_client.messages import Grammar

Verdict = Literal["complete", "cut", "refused"]

TOOL = "note"
REFUSED = (400, 422)  # OpenAI's status, and TGI's
# Causes that lie in no single keyword.
NO_KEYWORD = ("no value satisfies the schema", "Unsatisfiable schema", "a reference leads back to itself")


@dataclass(frozen=True, slots=True)
class Door:
    """One way to ask. `body` takes prompt, schema, most tokens and how to sample; `read` gives the text that is held to
    the schema, and whether it was cut by its length."""

    name: str
    path: str
    body: Callable[[str, Any, int, dict[str, Any]], dict[str, Any]]
    read: Callable[[Any], tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class Told:
    status: int
    text: str = ""
    is_cut: bool = False
    refusal: str = ""


async def ask(client: Client, door: Door, prompt: str, schema: Any, most: int, **sampling: Any) -> Told:
    status, answer = await client.exchange(door.path, door.body(prompt, schema, most, sampling))
    if status != 200:
        error = answer["error"]
        return Told(status, refusal=error if isinstance(error, str) else error["message"])
    text, is_cut = door.read(answer)
    return Told(status, text, is_cut)


def verdict(schema: Any, told: Told) -> Verdict:
    """What became of a request. AssertionError where it is none of the three that may be."""
    if told.status != 200:
        assert told.status in REFUSED, told
        assert names_its_cause(told.refusal, schema), (schema, told)
        return "refused"
    if told.is_cut:
        assert begins(grammar_of(schema), told.text), (schema, told)
        return "cut"
    Draft202012Validator(schema).validate(json.loads(told.text))
    return "complete"


def names_its_cause(refusal: str, schema: Any) -> bool:
    text = json.dumps(schema)
    named = any(f'"{keyword}"' in text for keyword in re.findall("`([^`]+)`", refusal))
    return named or any(cause in refusal for cause in NO_KEYWORD)


def grammar_of(schema: Any) -> Grammar:
    """What the router makes of it, for texts of any tokens."""
    found = Engine(byte_tokenizer()).check("json_schema", json.dumps(schema))
    assert isinstance(found, Grammar), found
    return found


def in_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a tool: one argument that holds to `schema`."""
    inner = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
    parameters = {"type": "object", "properties": {"value": inner}, "required": ["value"]}
    return parameters | {"additionalProperties": False, "$defs": schema.get("$defs", {})}


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _chat(prompt: str, schema: Any, most: int, sampling: dict[str, Any]) -> dict[str, Any]:
    held = {"type": "json_schema", "json_schema": {"name": "note", "schema": schema, "strict": True}}
    return {"messages": messages(prompt), "response_format": held, "max_tokens": most, **sampling}


def _generate(prompt: str, schema: Any, most: int, sampling: dict[str, Any]) -> dict[str, Any]:
    parameters = {"grammar": {"type": "json", "value": schema}, "max_new_tokens": most, "details": True}
    return {"inputs": prompt, "parameters": parameters | sampling}


def _completion(prompt: str, schema: Any, most: int, sampling: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": prompt, "guided_json": schema, "max_tokens": most, **sampling}


def _tools(prompt: str, schema: Any, most: int, sampling: dict[str, Any]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": TOOL, "parameters": schema}}]
    asked = {"messages": messages(prompt), "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    return {**asked, "max_tokens": most, **sampling}


def _read_choice(choice: Any, text: str, ends: tuple[str, ...] = ("stop",)) -> tuple[str, bool]:
    assert choice["finish_reason"] in (*ends, "length"), choice
    return text, choice["finish_reason"] == "length"


def _read_chat(answer: Any) -> tuple[str, bool]:
    (choice,) = answer["choices"]
    return _read_choice(choice, choice["message"]["content"])


def _read_generate(answer: Any) -> tuple[str, bool]:
    finish = answer["details"]["finish_reason"]
    assert finish in ("eos_token", "length"), answer
    return answer["generated_text"], finish == "length"


def _read_completion(answer: Any) -> tuple[str, bool]:
    (choice,) = answer["choices"]
    return _read_choice(choice, choice["text"])


def _read_tools(answer: Any) -> tuple[str, bool]:
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls") or []
    names = [call["function"]["name"] for call in calls]
    assert names == [TOOL] or (not names and choice["finish_reason"] == "length"), choice
    return _read_choice(choice, calls[0]["function"]["arguments"] if calls else "", ("tool_calls",))


CHAT = Door("response_format", "/v1/chat/completions", _chat, _read_chat)
GENERATE = Door("grammar", "/generate", _generate, _read_generate)
COMPLETION = Door("guided_json", "/v1/completions", _completion, _read_completion)
REQUIRED = Door("tools", "/v1/chat/completions", _tools, _read_tools)
