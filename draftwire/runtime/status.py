"""Errors to gRPC status codes and back: one table for unary calls and streams."""

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
    WrongRoleError,
)

STATUS: dict[type[BaseException], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    WrongRoleError: grpc.StatusCode.PERMISSION_DENIED,
    UnknownSessionError: grpc.StatusCode.NOT_FOUND,
    ProtocolViolationError: grpc.StatusCode.FAILED_PRECONDITION,
    ModelMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    NoRoomError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
}

ERROR = {
    code: kind for kind, code in STATUS.items() if issubclass(kind, DraftwireError) and kind is not ModelMismatchError
}
"""Errors by status code, for the clients of services; those that break a condition have violated the protocol. All
other codes become UnavailableError."""

MAX_MESSAGE = 1000
"""Most bytes of a status message. Percent-encoding can triple it, and one too long for the trailers would turn into
another error."""

CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {int(code.value[0]): code for code in grpc.StatusCode}


def root_cause(error: BaseException) -> BaseException:
    """Unwraps exception groups, which task groups raise, to their first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Returns the status code and message for the caller; INTERNAL, without details, for errors not in the table."""
    cause = root_cause(error)
    if isinstance(cause, grpc.aio.AioRpcError):  # from a peer that this service called
        cause = error_of(cause)
    for kind in type(cause).__mro__:
        if kind in STATUS:
            return STATUS[kind], str(cause).encode()[:MAX_MESSAGE].decode(errors="ignore") or kind.__name__
    return grpc.StatusCode.INTERNAL, "internal error"


def hints(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Returns trailing metadata for the caller: the retry delay, or the number of tokens to resume from."""
    cause = root_cause(error)
    if isinstance(cause, grpc.aio.AioRpcError):
        cause = error_of(cause)
    if isinstance(cause, NoRoomError):
        return ((RETRY_KEY, str(round(cause.retry_after_s * 1e3))),)
    if isinstance(cause, CompletionInterruptedError):
        return ((GENERATED_KEY, str(cause.num_generated_tokens)),)
    return ()


def error_of(error: grpc.aio.AioRpcError) -> DraftwireError:
    """Returns the error for a peer's status."""
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return NoRoomError.hinted(message, dict(error.trailing_metadata() or ()).get(RETRY_KEY))
    return ERROR.get(error.code(), UnavailableError)(message)


def error_of_number(number: int, message: str) -> DraftwireError:
    """Returns the error for the status code number of a `SessionFailure`."""
    code = CODE_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
    return ERROR.get(code, UnavailableError)(message)


def is_expected(error: BaseException) -> bool:
    """Whether an error is expected in normal operation and needs no traceback."""
    return isinstance(root_cause(error), asyncio.CancelledError) or status_of(error)[0] is not grpc.StatusCode.INTERNAL
