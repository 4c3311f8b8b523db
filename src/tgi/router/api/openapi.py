"""GET /api-doc/openapi.json: the OpenAPI 3.1 document of the routes that are served, made from their wire types.

What a struct cannot say (ranges that validation alone knows) stands in `_ranges`. Knows no handler.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgi.router.chat.tools import MAX_TOOLS
from tgi.router.schema.info import NativeError, OpenAIError
from tgi.router.schema.messages import AnthropicError
from tgi.router.validation.door import CHAT, COMPLETIONS, NATIVE, Door
from tgi.router.validation.parameters import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, Limits

VERSION = "3.1.0"
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"

TAGS = {
    "Text generation": "TGI's own routes",
    "OpenAI": "Routes that OpenAI's clients call",
    "Anthropic": "Routes that Anthropic's clients call",
    "Clouds": "Routes that cloud platforms call",
    "Server": "What the server is and how it does",
}

TGIS_NAMES = {
    "CompatRequest": "CompatGenerateRequest",
    "NativeError": "ErrorResponse",
    "StreamEvent": "StreamResponse",
    "TokenSlice": "SimpleToken",
    "Model": "ModelInfo",
    "Choice": "ChatCompletionComplete",
    "ChunkChoice": "ChatCompletionChoice",
    "Delta": "ChatCompletionDelta",
    "Logprobs": "ChatCompletionLogprobs",
    "TokenLogprob": "ChatCompletionLogprob",
    "TopLogprob": "ChatCompletionTopLogprob",
}
"""Structs that TGI's document calls otherwise: what is generated from the document keeps its names."""

SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

STATUSES = {
    200: "OK",
    400: "The body cannot be read, or asks for what cannot be",
    401: "The API key is missing or wrong",
    404: "There is none of this name",
    413: "The body is larger than --payload-limit",
    415: "The body is not said to be JSON, or is compressed",
    422: "The body has another shape, or asks for what cannot be",
    424: "The model failed on this request",
    429: "Too many requests at once",
    500: "A fault of the server",
    503: "The model is not there",
}

_REFERENCE = "#/components/schemas/{name}"


class ErrorStyle(Enum):
    """How a route tells its errors (`tgi.router.api.errors`)."""

    NATIVE = "flat object; plain text for a body that cannot be read"
    OPENAI = "OpenAI's object"
    ANTHROPIC = "Anthropic's object"


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of one route. Types are structs, or whatever else msgspec can describe."""

    id: str
    tag: str
    summary: str
    bodies: tuple[Any, ...] = ()  # the request's body is one of them
    example: Any = None  # a body
    answer: tuple[Any, ...] = ()  # the body of a 200 is one of them; empty: it has none, or is text
    answer_media: str = JSON
    events: tuple[Any, ...] = ()  # the data of an event is one of them, where the answer may be a stream
    errors: tuple[int, ...] = ()  # statuses, besides 401
    error_styles: tuple[ErrorStyle, ...] = (ErrorStyle.NATIVE,)
    answers: Mapping[int, Any] = field(default_factory=dict)  # bodies of statuses that are not told by an error object


class Served(Protocol):
    """A row of the table of routes."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def is_guarded(self) -> bool: ...
    @property
    def operation(self) -> Operation | None: ...


class Document:
    """Made when it is first asked for, and the same for the same server."""

    def __init__(self, rows: Sequence[Served], limits: Limits, version: str, has_key: bool) -> None:
        self._rows = rows
        self._limits = limits
        self._version = version
        self._has_key = has_key

    @cached_property
    def content(self) -> bytes:
        return msgspec.json.encode(self.tree)

    @cached_property
    def etag(self) -> str:
        return etag_of(self.content)

    @cached_property
    def tree(self) -> dict[str, Any]:
        operations = [row.operation for row in self._rows if row.operation is not None]
        wanted = _types(operations)
        schemas, components = msgspec.json.schema_components(wanted, ref_template=_REFERENCE)
        schema_of = dict(zip(map(repr, wanted), schemas, strict=True))
        for schema in components.values():
            del schema["title"]  # its name once more
            if "description" in schema:
                schema["description"] = schema["description"].partition("\n\n")[0]
        _put_ranges(components, self._limits)
        paths: dict[str, dict[str, Any]] = {}
        for row in self._rows:
            if row.operation is not None:
                path = re.sub(r"\{(\w+):path\}", r"{\1}", row.path)
                paths.setdefault(path, {})[row.method.lower()] = self._operation(row, row.operation, schema_of)
        used = {operation.tag for operation in operations}
        tree = {
            "openapi": VERSION,
            "info": {
                "title": "Text Generation Inference",
                "description": "A server of language models: TGI's routes, OpenAI's and Anthropic's.",
                "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
                "version": self._version,
            },
            "tags": [{"name": name, "description": text} for name, text in TAGS.items() if name in used],
            "paths": paths,
            "components": {"schemas": dict(sorted(components.items()))}
            | ({"securitySchemes": SECURITY} if self._has_key else {}),
        }
        return _with_tgis_names(tree)

    def _operation(self, row: Served, operation: Operation, schema_of: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {
            "operationId": operation.id,
            "tags": [operation.tag],
            "summary": operation.summary,
        }
        names = re.findall(r"\{(\w+)(?::path)?\}", row.path)
        if names:
            result["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[^\\r\\n]+$"}}
                for name in names
            ]
        if operation.bodies:
            content: dict[str, Any] = {"schema": _one_of(schema_of[repr(body)] for body in operation.bodies)}
            if operation.example is not None:
                content["example"] = operation.example
            result["requestBody"] = {"required": True, "content": {JSON: content}}
        result["responses"] = self._responses(row, operation, schema_of)
        if row.is_guarded and self._has_key:
            result["security"] = [{name: []} for name in SECURITY]
        return result

    def _responses(self, row: Served, operation: Operation, schema_of: Mapping[str, Any]) -> dict[str, Any]:
        content = {}
        if operation.answer:
            content[JSON] = {"schema": _one_of(schema_of[repr(answer)] for answer in operation.answer)}
        elif operation.answer_media != JSON:
            content[operation.answer_media] = {"schema": {"type": "string"}}
        if operation.events:
            content[EVENTS] = {"schema": _one_of(schema_of[repr(event)] for event in operation.events)}
        answers = {200: _response(200, content)}
        for status, body in operation.answers.items():
            answers[status] = _response(status, {JSON: {"schema": schema_of[repr(body)]}})
        statuses = operation.errors + ((401,) if row.is_guarded and self._has_key else ())
        for status in statuses:
            answers[status] = _error(status, operation.error_styles, schema_of)
        return {str(status): answers[status] for status in sorted(answers)}


async def document(request: Request) -> Response:
    made: Document = request.app.state.document
    content = await asyncio.to_thread(lambda: made.content)  # the first time, some milliseconds of work
    return cached(request, content, made.etag, JSON, "no-cache")


def etag_of(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def cached(request: Request, content: bytes, etag: str, media_type: str, cache_control: str) -> Response:
    """The content, or 304 where the client has it."""
    headers = {"etag": etag, "cache-control": cache_control, "x-content-type-options": "nosniff"}
    given = request.headers.get("if-none-match", "")
    if etag in (tag.strip().removeprefix("W/") for tag in given.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(content, 200, headers, media_type)


def _types(operations: Iterable[Operation]) -> list[Any]:
    found: dict[str, Any] = {repr(kind): kind for kind in (NativeError, OpenAIError, AnthropicError)}
    for operation in operations:
        for kind in (*operation.bodies, *operation.answer, *operation.events, *operation.answers.values()):
            found[repr(kind)] = kind
    return [found[name] for name in sorted(found)]


def _one_of(schemas: Iterable[Any]) -> Any:
    choices = list(schemas)
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _response(status: int, content: Mapping[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": STATUSES[status]}
    if content:
        response["content"] = content
    return response


def _error(status: int, styles: Sequence[ErrorStyle], schema_of: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    objects = []
    if ErrorStyle.NATIVE in styles:
        if status in (400, 413, 415, 422):
            content[TEXT] = {"schema": {"type": "string"}}
        if status not in (400, 401, 404, 413, 415):
            objects.append(NativeError)
    if ErrorStyle.OPENAI in styles:
        objects.append(OpenAIError)
    if ErrorStyle.ANTHROPIC in styles:
        objects.append(AnthropicError)
    if objects:
        content[JSON] = {"schema": _one_of(schema_of[repr(kind)] for kind in objects)}
    response = _response(status, content)
    if status == 429:
        response["headers"] = {"retry-after": {"description": "seconds", "schema": {"type": "integer"}}}
    if status == 401:
        response["headers"] = {"www-authenticate": {"schema": {"type": "string"}}}
    return response


def _put_ranges(components: Mapping[str, Any], limits: Limits) -> None:
    for (struct, name), facts in _ranges(limits).items():
        if struct not in components:
            continue
        properties = components[struct]["properties"]
        kind = facts.pop("type")
        target = properties[name]
        for choice in target.get("anyOf", [target]):
            if choice.get("type") in ((kind, "integer") if kind == "number" else (kind,)):
                choice.update(facts)
    if "VertexRequest" in components:
        instance = {"anyOf": [{"$ref": _REFERENCE.format(name=name)} for name in ("GenerateRequest", "ChatRequest")]}
        components["VertexRequest"]["properties"]["instances"] |= {"items": instance, "minItems": 1}


MAX_F32 = 3.4028234e38


def _ranges(limits: Limits) -> dict[tuple[str, str], dict[str, Any]]:
    """What `tgi.router.validation` enforces, as far as it does not hang on the rest of the request."""
    penalty = {"type": "number", "minimum": -2.0, "maximum": 2.0}
    token_id = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}

    def top_n(door: Door) -> dict[str, Any]:
        return {"type": "integer", "minimum": 0, "maximum": max(limits.max_top_n_tokens, door.granted_top_n)}

    bad_word = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD}
    share = {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}
    common: dict[str, dict[str, Any]] = {
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0.0, "maximum": MAX_F32},
        "frequency_penalty": penalty,
        "presence_penalty": penalty,
        "top_p": share,
        "typical_p": share,
        "min_p": {"type": "number", "minimum": 0.0, "maximum": 1.0},
        "top_k": {"type": "integer", "minimum": 0},
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        "stop": {"type": "array", "maxItems": limits.max_stop_sequences},
        "stop_token_ids": {"type": "array", "maxItems": MAX_STOP_TOKEN_IDS, "items": token_id},
        "bad_words": {"type": "array", "maxItems": MAX_BAD_WORDS, "items": bad_word},
    }
    native: dict[str, dict[str, Any]] = {
        "temperature": {"type": "number", "exclusiveMinimum": 0.0, "maximum": MAX_F32},
        "max_new_tokens": {"type": "integer", "minimum": 1},
        "best_of": {"type": "integer", "maximum": limits.max_best_of},
        "grammar": _tagged("json", "json_object", "json_schema", "regex") | {"required": ["type", "value"]},
        "truncate": {"type": "integer", "minimum": 1, "maximum": limits.max_input_tokens},
    }
    on_v1: dict[str, dict[str, Any]] = {
        "temperature": {"type": "number", "minimum": 0.0, "maximum": MAX_F32},
        "top_p": {"type": "number", "minimum": 0.0, "maximum": 1.0},
        "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
        "max_tokens": {"type": "integer", "minimum": 1},
        "response_format": _tagged("text", "json_object", "json_schema", "json", "regex") | {"required": ["type"]},
    }
    length = {"type": "integer", "minimum": 1}
    tools = {"tools": {"type": "array", "maxItems": MAX_TOOLS}}
    turns = {"messages": {"type": "array", "minItems": 1}}
    chat = tools | {"max_completion_tokens": length}
    translated = {name: facts for name, facts in common.items() if name != "stop"} | {
        name: on_v1[name] for name in ("temperature", "top_p", "seed")
    }
    rows = {
        "GenerateParameters": common | native | {"top_n_tokens": top_n(NATIVE)},
        "ChatRequest": common | on_v1 | chat | {"top_logprobs": top_n(CHAT)},
        "CompletionRequest": common | on_v1 | {"logprobs": top_n(COMPLETIONS)},
        "ResponsesRequest": translated
        | tools
        | {"stop": common["stop"], "max_output_tokens": length, "top_logprobs": top_n(CHAT)},
        "MessagesRequest": translated | tools | turns | {"stop_sequences": common["stop"], "max_tokens": length},
        "CountTokensRequest": tools | turns,
    }
    return {(struct, name): dict(facts) for struct, fields in rows.items() for name, facts in fields.items()}


def _tagged(*types: str) -> dict[str, Any]:
    """An object whose other fields hang on its `type`."""
    return {"type": "object", "properties": {"type": {"enum": list(types)}, "value": {}}}


def _with_tgis_names(tree: dict[str, Any]) -> dict[str, Any]:
    schemas = tree["components"]["schemas"]
    names = {ours: tgis for ours, tgis in TGIS_NAMES.items() if ours in schemas and tgis not in schemas}
    tree["components"]["schemas"] = {names.get(name, name): schema for name, schema in schemas.items()}
    references = {_REFERENCE.format(name=ours): _REFERENCE.format(name=tgis) for ours, tgis in names.items()}
    return _renamed(tree, references)


def _renamed(value: Any, references: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: references.get(item, item) if key == "$ref" else _renamed(item, references)
            for key, item in value.items()
        }
    return [_renamed(item, references) for item in value] if isinstance(value, list) else value
