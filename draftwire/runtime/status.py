"""Errors to gRPC statuses: one table for unary calls and streams."""

import asyncio

import grpc

from draftwire.errors import (
    GENERATED_KEY,
    RETRY_KEY,
    CompletionInterruptedError,
    DraftwireError,
    InvalidRequestError,
    ModelMismatchError,
    NoRoomError,
    ProtocolViolationError,
    UnauthenticatedError,
    UnavailableError,
    UnknownSessionError,
)

STATUS: dict[type[BaseException], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    UnknownSessionError: grpc.StatusCode.NOT_FOUND,
    ProtocolViolationError: grpc.StatusCode.FAILED_PRECONDITION,
    ModelMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    NoRoomError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
}

ERROR: dict[grpc.StatusCode, type[DraftwireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.NOT_FOUND: UnknownSessionError,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolViolationError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoRoomError,
}
"""The way back, for a service that is another's client. Everything else is UnavailableError."""

MAX_MESSAGE = 1000
"""Bytes of a message: a longer one would not fit in the trailers, three times as long there, and look like another
error."""

CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {int(code.value[0]): code for code in grpc.StatusCode}


def root_cause(error: BaseException) -> BaseException:
    """Returns the first error inside exception groups, which task groups wrap around what their tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Returns the status and the message that a caller sees. What is not in the table stays opaque."""
    cause = root_cause(error)
    if isinstance(cause, grpc.aio.AioRpcError):  # of a peer that this service called
        cause = error_of(cause)
    for kind in type(cause).__mro__:
        if kind in STATUS:
            return STATUS[kind], str(cause).encode()[:MAX_MESSAGE].decode(errors="ignore") or kind.__name__
    return grpc.StatusCode.INTERNAL, "internal error"


def hints(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Returns the trailing metadata that tells a caller when to try again, or from where to go on."""
    cause = root_cause(error)
    if isinstance(cause, grpc.aio.AioRpcError):
        cause = error_of(cause)
    if isinstance(cause, NoRoomError):
        return ((RETRY_KEY, str(round(cause.retry_after_s * 1e3))),)
    if isinstance(cause, CompletionInterruptedError):
        return ((GENERATED_KEY, str(cause.num_generated_tokens)),)
    return ()


def error_of(error: grpc.aio.AioRpcError) -> DraftwireError:
    """Returns the error that a peer's status stands for."""
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return NoRoomError.hinted(message, dict(error.trailing_metadata() or ()).get(RETRY_KEY))
    return ERROR.get(error.code(), UnavailableError)(message)


def error_of_number(number: int, message: str) -> DraftwireError:
    """Returns the error that a status number in a `SessionFailure` stands for."""
    code = CODE_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
    return ERROR.get(code, UnavailableError)(message)


def is_expected(error: BaseException) -> bool:
    """Whether an error is part of normal life and needs no traceback."""
    return isinstance(root_cause(error), asyncio.CancelledError) or status_of(error)[0] is not grpc.StatusCode.INTERNAL
