"""Errors of the client from the gRPC status of a call."""

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
"""Part of gRPC's message for a request above the receiver's size limit, which has no status code of its own."""

_HTTP = "Trying to connect an http1.x server"
"""Part of gRPC's message for the port of a server of HTTP/1."""

_ERRORS: dict[grpc.StatusCode, type[DraftwireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
}


@dataclass(frozen=True, slots=True)
class Interruption:
    """Reason why a call ended before its completions were finished."""

    error: DraftwireError
    may_pass: bool
    """Whether a retry may help."""


def interruption_of(error: grpc.RpcError | None) -> Interruption:
    """Returns the interruption for the error of a call; None stands for a stream that ended without an error."""
    if error is None:
        return Interruption(UnavailableError("the stream ended without a finish"), may_pass=True)
    own_error = error_of(error)
    is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return Interruption(own_error, isinstance(own_error, UnavailableError | NoRoomError) and not is_late)


def error_of(error: grpc.RpcError) -> DraftwireError:
    """Returns the `DraftwireError` for a gateway's status code."""
    code = error.code()
    details = error.details() or code.name
    if _HTTP in details:
        return InvalidRequestError("address: that port speaks HTTP; name the gateway's gRPC port, by default 50051")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:  # a retry does not help
        return InvalidRequestError(f"the request is too large: {details} bytes")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        pairs: Any = error.trailing_metadata() or ()  # pairs of key and value, with grpc and with grpc.aio
        return NoRoomError.hinted(details, dict(pairs).get(RETRY_KEY))
    return _ERRORS.get(code, UnavailableError)(details)
