"""Server interceptor: decides on a call by its metadata, before its request is received, limits calls, and maps
exceptions to gRPC statuses.
"""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from typing_extensions import override

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.runtime.call_limits import ARRIVAL_SECONDS, Arrivals, CallCounter, CallLimits
from draftwire.runtime.error_details import details_of
from draftwire.runtime.message_scan import MALFORMED, SCANNED_BYTES, check_num_fields
from draftwire.runtime.served_request import REQUEST_ID, ServedRequest, serving
from draftwire.runtime.status import hints, is_expected, status_of

log = structlog.get_logger()

Metadata = Iterable[tuple[str, str | bytes]]
Trailing = tuple[tuple[str, str | bytes], ...]
Admit = Callable[[str, Metadata], AbstractContextManager[None]]
"""Gets the name and the metadata of a call, and returns what the call holds while its request arrives. Raises, also on
entry, to refuse the call."""

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

OWN_METHODS = "/draftwire.v1."
OTHER_METHODS = "other"
"""Name of all methods that a server does not have: clients choose them, and each would be a series of its own."""
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

num_received_bytes = ContextVar("num_received_bytes", default=0)
"""Size of the message of a stream that the running task has taken last: to measure a decoded one is to encode it."""

MAX_WATCHES = 64
"""Streams of health that may be open at once. Nobody has to show a token for one."""
MAX_REFLECTIONS = 8
"""Streams of reflection that may be open at once, for `ARRIVAL_SECONDS` at most."""
MAX_ARRIVING_QUESTIONS = 8
"""Requests of health that may arrive slowly at once."""
MAX_QUESTION_BYTES = 4096
"""Largest request of health and reflection: a name."""


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that has ended, however it did."""

    method: str
    """Full name, such as /draftwire.v1.GatewayService/Generate, or `OTHER_METHODS`."""
    code: str
    """Name of its gRPC status, such as OK."""
    duration_s: float
    """Seconds since its headers were read."""


def ignore_ends(_call: EndedCall) -> None:
    """Does nothing with calls that ended."""


def value_of(metadata: Metadata, name: str) -> str | None:
    """Returns the value of a call's header; None if it is missing or repeated."""
    values = [str(value) for key, value in metadata if key == name]
    return values[0] if len(values) == 1 else None


def admit_all(_method: str, _metadata: Metadata) -> AbstractContextManager[None]:
    """Admits every call."""
    return nullcontext()


class ServiceGate(grpc.aio.ServerInterceptor):
    """Wraps all methods. Servicers of the package `draftwire.v1` are coroutines (no generators).

    A request is received once the service is ready and the call is admitted, so whoever is refused makes the server
    hold and decode nothing. Health and reflection answer everybody, at any time, within limits of their own.

    Attributes:
        refusal: state in which calls are refused, such as "loading"; empty while the service is ready.
        is_live: whether the service can become ready without a restart.
    """

    def __init__(
        self,
        limits: CallLimits | None = None,
        admit: Admit = admit_all,
        on_end: Callable[[EndedCall], None] = ignore_ends,
        why_unready: Callable[[], str] = str,
    ) -> None:
        """Refuses calls until `refusal` is empty. `limits` and `admit` are of the package's methods alone.

        `on_end` is called for each call that has ended, while its request is still the one that is served.
        """
        self.refusal = "loading"
        self.is_live = True
        self._admit = admit
        self._on_end = on_end
        self._why_unready = why_unready
        limits = limits or CallLimits()
        self._calls = CallCounter("calls", limits.max_calls)
        self._arrivals = Arrivals(limits.max_arriving)
        self._is_public = limits.is_public
        self._watches = CallCounter("streams of health", MAX_WATCHES)
        self._reflections = CallCounter("streams of reflection", MAX_REFLECTIONS)
        self._questions = Arrivals(MAX_ARRIVING_QUESTIONS)

    @property
    def unready(self) -> str:
        """Reason why the service should get no calls: all that probes of readiness report."""
        return self.refusal or self._why_unready()

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            self._on_end(EndedCall(OTHER_METHODS, grpc.StatusCode.UNIMPLEMENTED.name, 0.0))
            return None
        method: str = handler_call_details.method
        serve = self._serve_own if method.startswith(OWN_METHODS) else self._serve_common

        async def guarded(_requests: Any, context: Context) -> Any:
            started_at, code = time.perf_counter(), grpc.StatusCode.OK
            with self._serving(context) as request:
                echoed: Trailing = ()
                if self._is_public and request is not None:
                    echoed = ((REQUEST_ID, request.id),)
                    context.set_trailing_metadata(echoed)
                try:
                    return await serve(handler, method, context)
                except (asyncio.CancelledError, grpc.aio.InternalError):  # the call is over
                    code = grpc.StatusCode.CANCELLED
                    raise
                except grpc.aio.AbortError:
                    code = context.code()
                    raise
                except Exception as error:
                    if not is_expected(error):
                        log.exception("rpc.method_failed", method=method)
                    code, message = status_of(error)
                    trailing: Trailing = (*hints(error), *(details_of(error) if self._is_public else ()), *echoed)
                    error.__traceback__ = None  # see `_abort`: tasks keep their exceptions, and frames keep tasks
                finally:
                    self._on_end(EndedCall(method, code.name, time.perf_counter() - started_at))
                await _abort(context, code, message, trailing)
                return None

        # To gRPC every request is a stream, because it would receive any other before it calls the handler.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        wrapped: Handler = make(guarded, response_serializer=handler.response_serializer)
        return wrapped

    def _serving(self, context: Context) -> AbstractContextManager[ServedRequest | None]:
        """Returns the context of a call: of a user always a request, of a peer if it says for which one it calls."""
        given = value_of(context.invocation_metadata() or (), REQUEST_ID)
        return serving(given) if self._is_public or given is not None else nullcontext()

    async def _serve_own(self, handler: Handler, method: str, context: Context) -> Any:
        if self.refusal:
            raise UnavailableError(f"service is {self.refusal}")
        found = descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", "."))
        decode = _decoder(handler, lambda data: check_num_fields(data, found.input_type))
        with self._calls.one():
            with self._admit(method, context.invocation_metadata() or ()):
                request = (
                    _decoded(context, decode) if handler.request_streaming else await self._receive(context, decode)
                )
            return await _inner(handler)(request, context)

    async def _receive(self, context: Context, decode: Callable[[bytes], Any]) -> Any:
        """Returns the request of a call that has one.

        That of a user arrives until it is decoded: what waits for that counts, since users may send much at once.
        """

        async def read() -> Any:
            return await _decode(decode, _present(await context.read()))

        if self._is_public:
            return await self._arrivals.receive(read)
        return await _decode(decode, _present(await self._arrivals.receive(context.read)))

    async def _serve_common(self, handler: Handler, method: str, context: Context) -> Any:
        """Serves a call of health or reflection, for which nobody needs a token."""
        inner, decode = _inner(handler), _decoder(handler, _check_question)
        if handler.request_streaming:
            with self._reflections.one():
                async with asyncio.timeout(ARRIVAL_SECONDS):
                    async for response in inner(_decoded(context, decode), context):
                        await context.write(response)
            return None
        request = decode(_present(await self._questions.receive(context.read)))
        with nullcontext() if method == HEALTH_CHECK else self._watches.one():
            return await inner(request, context)


async def _abort(context: Context, code: grpc.StatusCode, message: str, trailing: Trailing) -> None:
    """Ends a call with a status.

    gRPC keeps the exception with the call, to raise it again when the method returns. By its traceback the two would
    refer to each other, and what has arrived of the request would live until the next collection.
    """
    try:
        await context.abort(code, message, trailing)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None


def _inner(handler: Handler) -> Callable[..., Any]:
    inner: Callable[..., Any] | None = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    assert inner is not None, "a handler has a method"
    return inner


def _decoder(handler: Handler, check: Callable[[bytes], None]) -> Callable[[bytes], Any]:
    """Returns what decodes the requests of a method, after `check`. It raises InvalidRequestError."""
    deserialize = handler.request_deserializer
    assert deserialize is not None, "generated code sets one"

    def decode(data: bytes) -> Any:
        check(data)
        try:
            return deserialize(data)
        except DecodeError:
            raise InvalidRequestError(MALFORMED) from None

    return decode


def _check_question(data: bytes) -> None:
    if len(data) > MAX_QUESTION_BYTES:
        raise InvalidRequestError(f"a request takes at most {MAX_QUESTION_BYTES} bytes here")


def _present(data: Any) -> bytes:
    if data is grpc.aio.EOF:
        raise InvalidRequestError("the call has no request")
    assert isinstance(data, bytes), "nothing is deserialized yet"
    return data


async def _decoded(context: Context, decode: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    """Yields the requests of a stream. Raises InvalidRequestError when one is reached that cannot be decoded."""
    while (data := await context.read()) is not grpc.aio.EOF:
        message = await _decode(decode, data)
        num_received_bytes.set(len(data))
        yield message


async def _decode(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """Returns a message. A large one is decoded on a thread: other calls do not wait for it."""
    return decode(data) if len(data) < SCANNED_BYTES else await asyncio.to_thread(decode, data)
