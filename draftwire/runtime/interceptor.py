"""Server interceptor: maps exceptions to gRPC statuses, and refuses calls while the service is not ready."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from typing_extensions import override

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.runtime.status import hints, is_expected, status_of

log = structlog.get_logger()


class ServiceGate(grpc.aio.ServerInterceptor):
    """Wraps all methods of the package `draftwire.v1`, whose servicers are coroutines (no generators).

    Attributes:
        refusal: state in which calls are refused, such as "loading"; empty while the service is ready.
    """

    def __init__(self) -> None:
        self.refusal = "loading"

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or not method.startswith("/draftwire.v1."):
            return handler
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            inner = getattr(handler, kind)
            if inner is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                guarded: grpc.RpcMethodHandler[Any, Any] = make(
                    self._guard(inner, method),
                    request_deserializer=_tolerant(handler.request_deserializer),
                    response_serializer=handler.response_serializer,
                )
                return guarded
        return handler

    def _guard(self, inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                if self.refusal:
                    raise UnavailableError(f"service is {self.refusal}")
                return await inner(_checked(request), context)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if not is_expected(error):
                    log.exception("rpc.method_failed", method=method)
                code, message = status_of(error)
                await context.abort(code, message, hints(error))

        return guarded


class _Undecodable:
    """Stands for a request whose bytes are not a message."""


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Returns a deserializer that does not raise: gRPC would report that as INTERNAL."""
    assert deserialize is not None, "generated code sets one"

    def tolerant(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Undecodable()

    return tolerant


def _checked(request: Any) -> Any:
    """Returns a request, or the requests of a stream.

    Raises:
        InvalidRequestError: a request could not be decoded; in a stream, raised when it is reached.
    """
    if isinstance(request, AsyncIterator):
        return _checked_stream(request)
    if isinstance(request, _Undecodable):
        raise InvalidRequestError("the bytes are not those of a message")
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
