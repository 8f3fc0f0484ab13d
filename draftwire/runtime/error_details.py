"""Errors to the details that gRPC's tools and clients look for: google.rpc.BadRequest, RetryInfo and ErrorInfo.

Source: Google AIP-193, "Errors". They travel as `google.rpc.Status` in the trailing metadata `DETAILS_KEY`.
"""

import re
from functools import cache

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from draftwire.errors import (
    CompletionInterruptedError,
    ContextLengthError,
    InvalidRequestError,
    NoRoomError,
    UnauthenticatedError,
    UnavailableError,
)
from draftwire.runtime.status import root_cause, status_of
from draftwire.v1 import gateway_pb2, session_pb2

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "draftwire"

REASONS: dict[type[BaseException], str] = {
    ContextLengthError: "CONTEXT_LENGTH_EXCEEDED",
    InvalidRequestError: "INVALID_PARAMETER",
    NoRoomError: "NO_ROOM",
    UnauthenticatedError: "INVALID_TOKEN",
    CompletionInterruptedError: "COMPLETION_INTERRUPTED",
    UnavailableError: "UNAVAILABLE",
}
"""Reasons by class of error, the more special ones first."""

_NAME = re.compile(r"\b([a-z_]+)(?=:|\[| must| takes| has to)")
"""Pattern of what may be a name in a message, since the message goes on about it."""


def details_of(error: BaseException) -> tuple[tuple[str, bytes], ...]:
    """Returns trailing metadata with the details of an error; none of one that is not in `REASONS`."""
    cause = root_cause(error)
    reason = next((reason for kind, reason in REASONS.items() if isinstance(cause, kind)), None)
    if reason is None:
        return ()
    code, message = status_of(cause)
    status = Status(code=code.value[0], message=message)
    info = ErrorInfo(reason=reason, domain=DOMAIN)
    parts: list[Message] = [info]
    match cause:
        case InvalidRequestError():
            violation = BadRequest.FieldViolation(field=_field_of(message), description=message)
            parts.append(BadRequest(field_violations=[violation]))
        case NoRoomError():
            retry = RetryInfo()
            retry.retry_delay.FromMilliseconds(round(cause.retry_after_s * 1e3))
            parts.append(retry)
        case CompletionInterruptedError():
            info.metadata["num_generated_tokens"] = str(cause.num_generated_tokens)
    for part in parts:
        status.details.add().Pack(part)
    return ((DETAILS_KEY, status.SerializeToString()),)


def _field_of(message: str) -> str:
    """Returns the first field that a message names; empty if it names none."""
    return next((name for name in _NAME.findall(message) if name in _fields()), "")


@cache
def _fields() -> frozenset[str]:
    kinds: list[Descriptor] = [
        gateway_pb2.GenerateRequest.DESCRIPTOR,
        gateway_pb2.ChatPrompt.DESCRIPTOR,
        session_pb2.SamplingParameters.DESCRIPTOR,
    ]
    return frozenset(field.name for kind in kinds for field in kind.fields) - {"text"}
