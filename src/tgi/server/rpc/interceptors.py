"""Exception -> gRPC status: the only such place of the model server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc

from tgi.errors import InvalidRequest, StartupError, TgiError
from tgi.server.engine.service import NotWarm, StreamIsOpen

log = logging.getLogger(__name__)

STATUS: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (StreamIsOpen, grpc.StatusCode.FAILED_PRECONDITION),
    (NotWarm, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (StartupError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TgiError, grpc.StatusCode.INTERNAL),
)


class ErrorInterceptor(grpc.ServerInterceptor):
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                _stream(handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behavior(request, context)
        except Exception as error:
            _abort(context, error)

    return call


def _stream(behavior: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def call(requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behavior(requests, context)
        except Exception as error:
            _abort(context, error)

    return call


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    for kind, status in STATUS:
        if isinstance(error, kind):
            log.warning("call refused: %s", error)
            context.abort(status, str(error))
    log.exception("a call failed")
    context.abort(grpc.StatusCode.INTERNAL, f"{error}" or type(error).__name__)
