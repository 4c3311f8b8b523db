"""Exception -> status and JSON: the only such table. TGI's flat body on its own routes, OpenAI's object on /v1, and
Anthropic's on /v1/messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tgi.errors import (
    ContextTooLong,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    TemplateFailed,
    TgiError,
    ToolFailed,
    Unavailable,
)
from tgi.router.api.middleware import request_id_of
from tgi.router.schema.info import NativeError, OpenAIError, OpenAIErrorObject
from tgi.router.schema.messages import AnthropicError, AnthropicErrorObject

CLIENT_GONE = 499

REQUEST_ID_HEADER = "request-id"
"""Anthropic's name for the label of a request, on its routes beside ours."""

_encode = msgspec.json.Encoder().encode


class BodyRefused(Exception):
    """The body could not be read as what the route takes. `text` is plain text in TGI's words, `param` the place."""

    def __init__(self, status: int, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.param = param


class ClientGone(Exception):
    """The client hung up before its answer was ready. Nobody reads what we answer."""


class Refused(InvalidRequest):
    """What one route alone refuses, in a text and with a TGI `error_type` of its own."""

    def __init__(
        self, message: str, error_type: str, param: str | None = None, code: str | None = None, status: int = 422
    ) -> None:
        """`status` as on TGI's routes."""
        super().__init__(message, param)
        self.error_type = error_type
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as both families of routes tell it."""

    status: int  # on TGI's routes
    message: str
    error_type: str
    openai_type: str = "server_error"
    openai_status: int | None = None  # None: the same
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status_on_v1(self) -> int:
        return self.openai_status or self.status


def fault_of(error: TgiError) -> Fault:
    if isinstance(error, InvalidRequest):
        return _fault_of_request(error)
    if isinstance(error, Overloaded):
        retry = {"retry-after": str(error.retry_after_s)}
        return Fault(429, str(error), "overloaded", "rate_limit_error", code="overloaded", headers=retry)
    if isinstance(error, GenerationFailed):
        text = f"Request failed during generation: Server error: {error}"
        return Fault(424, text, "generation", code="generation_failed")
    if isinstance(error, Unavailable):
        return Fault(503, f"The model server cannot be reached: {error}", "unavailable", code="unavailable")
    return Fault(500, str(error), "incomplete_generation")


def native_body(error: TgiError) -> bytes:
    fault = fault_of(error)
    return _encode(NativeError(fault.message, fault.error_type))


def openai_body(error: TgiError) -> bytes:
    """For an event of a stream: with the status that the head could no longer tell."""
    return _openai_body(fault_of(error), in_stream=True)


def native_response(error: TgiError) -> Response:
    fault = fault_of(error)
    return _json(fault.status, native_body(error), fault.headers)


def openai_response(error: TgiError) -> Response:
    fault = fault_of(error)
    return _json(fault.status_on_v1, _openai_body(fault), fault.headers)


def anthropic_body(error: TgiError, request_id: str) -> bytes:
    """Also the data of an event of a stream."""
    return _anthropic_body(fault_of(error), request_id)


def anthropic_response(error: TgiError, request_id: str) -> Response:
    return _anthropic_response(fault_of(error), request_id)


def is_openai(request: Request) -> bool:
    return request.scope["path"].startswith("/v1/")


def is_anthropic(request: Request) -> bool:
    return f"{request.scope['path']}/".startswith("/v1/messages/")


# Handlers for the application; coroutines, since Starlette would run plain functions in a thread.


async def on_tgi_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TgiError)
    return _v1_response(request, fault_of(error)) if is_openai(request) else native_response(error)


async def on_body_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, BodyRefused)
    if not is_openai(request):
        return PlainTextResponse(error.text, error.status)
    status = 400 if error.status == 422 else error.status
    code = _CODES.get(error.status)
    fault = Fault(status, error.text, "validation", "invalid_request_error", param=error.param, code=code)
    return _v1_response(request, fault)


async def on_http_error(request: Request, error: Exception) -> Response:
    """401, 404, 405: TGI says nothing but the status."""
    assert isinstance(error, HTTPException)
    if not is_openai(request):
        return Response(status_code=error.status_code, headers=error.headers)
    openai_type = "authentication_error" if error.status_code == 401 else "invalid_request_error"
    code = _CODES.get(error.status_code)
    fault = Fault(error.status_code, error.detail, "http", openai_type, code=code, headers=error.headers or {})
    return _v1_response(request, fault)


async def on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def on_too_deep(request: Request, error: Exception) -> Response:
    """A value that the reader of the body just let pass, and something behind it did not."""
    return await on_body_refused(request, BodyRefused(400, "The request body is nested too deeply"))


async def on_fault_of_ours(request: Request, error: Exception) -> Response:
    """A bug. The server logs it with its traceback; the client is told no more than that."""
    fault = Fault(500, "Internal server error", "internal")
    if is_openai(request):
        return _v1_response(request, fault)
    return _json(500, _encode(NativeError(fault.message, fault.error_type)))


# Of what no handler has refused; our own words, since those of http.HTTPStatus change with Python.
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_entity_too_large",
    415: "unsupported_media_type",
}

HANDLERS = {
    TgiError: on_tgi_error,
    BodyRefused: on_body_refused,
    HTTPException: on_http_error,
    ClientGone: on_client_gone,
    RecursionError: on_too_deep,
    Exception: on_fault_of_ours,
}


def _fault_of_request(error: InvalidRequest) -> Fault:
    if isinstance(error, Refused):
        return Fault(
            error.status,
            str(error),
            error.error_type,
            "invalid_request_error",
            400 if error.status == 422 else None,
            error.param,
            error.code,
        )
    if isinstance(error, TemplateFailed):
        text, error_type, code = f"Template error: {error}", "template_error", "template_error"
    elif isinstance(error, ToolFailed):
        text, error_type, code = f"Tool error: {error}", "tool_error", "tool_error"
    else:
        text, error_type = f"Input validation error: {error}", "validation"
        code = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
    return Fault(422, text, error_type, "invalid_request_error", 400, error.param, code)


def _v1_response(request: Request, fault: Fault) -> Response:
    if is_anthropic(request):
        return _anthropic_response(fault, request_id_of(request.scope))
    return _json(fault.status_on_v1, _openai_body(fault), fault.headers)


def _openai_body(fault: Fault, in_stream: bool = False) -> bytes:
    status = fault.status_on_v1 if in_stream else msgspec.UNSET
    return _encode(
        OpenAIError(
            OpenAIErrorObject(
                message=fault.message,
                type=fault.openai_type,
                param=fault.param,
                code=fault.code,
                http_status_code=status,
            ),
            fault.error_type,
        )
    )


# Anthropic has no status for a model that failed on one request: its clients try again after any of 500 or more.
_ANTHROPIC_STATUSES = {424: 500}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def _anthropic_response(fault: Fault, request_id: str) -> Response:
    status = _ANTHROPIC_STATUSES.get(fault.status_on_v1, fault.status_on_v1)
    return _json(status, _anthropic_body(fault, request_id), {**fault.headers, REQUEST_ID_HEADER: request_id})


def _anthropic_body(fault: Fault, request_id: str) -> bytes:
    status = fault.status_on_v1
    default = "invalid_request_error" if status < 424 else "api_error"
    # Agents look for these words, and shorten the conversation.
    mark = "prompt is too long: " if fault.code == "context_length_exceeded" else ""
    return _encode(
        AnthropicError(AnthropicErrorObject(_ANTHROPIC_TYPES.get(status, default), mark + fault.message), request_id)
    )


def _json(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")
