"""Turns what a method raises into a status, and refuses calls while the service is not ready."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog

from draftwire.errors import UnavailableError
from draftwire.services.rpc.status import hints, is_expected, status_of

log = structlog.get_logger()


class ServiceGate(grpc.aio.ServerInterceptor):
    """Guards all methods of the package `draftwire.v1`, whose servicers are coroutines (no generators).

    Attributes:
        refusal: why calls are refused now; empty while the service is ready.
    """

    def __init__(self) -> None:
        self.refusal = "loading"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See `grpc.aio.ServerInterceptor`."""
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
                    request_deserializer=handler.request_deserializer,
                    response_serializer=handler.response_serializer,
                )
                return guarded
        return handler

    def _guard(self, inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                if self.refusal:
                    raise UnavailableError(f"service is {self.refusal}")
                return await inner(request, context)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if not is_expected(error):
                    log.exception("rpc.method_failed", method=method)
                code, message = status_of(error)
                await context.abort(code, message, hints(error))

        return guarded
