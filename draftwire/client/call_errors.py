"""What a gateway's status means to its client."""

from dataclasses import dataclass
from typing import Any

import grpc

from draftwire.errors import (
    RETRY_KEY,
    DraftwireError,
    InvalidRequestError,
    ModelMismatchError,
    NoRoomError,
    UnauthenticatedError,
    UnavailableError,
)

_TOO_LARGE = "message larger than max"
"""Part of what gRPC says of a message above the receiver's limit. It has no status of its own for that."""

_ERRORS: dict[grpc.StatusCode, type[DraftwireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
}


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why a call ended before all had come."""

    error: DraftwireError
    may_pass: bool
    """Whether it may help to ask again."""


def interruption_of(error: grpc.RpcError | None) -> Interruption:
    """Returns what the status of a call stands for; None is that of one which just ended."""
    if error is None:
        return Interruption(UnavailableError("the stream ended without a finish"), may_pass=True)
    meant = error_of(error)
    is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return Interruption(meant, isinstance(meant, UnavailableError | NoRoomError) and not is_late)


def error_of(error: grpc.RpcError) -> DraftwireError:
    """Returns the error that a gateway's status stands for."""
    code = error.code()
    details = error.details() or code.name
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:  # asking again does not help
        return InvalidRequestError(f"the request is too large: {details} bytes")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        pairs: Any = error.trailing_metadata() or ()  # of keys and values, in both kinds of calls
        return NoRoomError.hinted(details, dict(pairs).get(RETRY_KEY))
    return _ERRORS.get(code, UnavailableError)(details)
