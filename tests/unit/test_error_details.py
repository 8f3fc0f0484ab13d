"""Errors carry the details of Google's error model: what to mend, and when to try again."""

import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from draftwire.errors import (
    CompletionInterruptedError,
    ContextLengthError,
    DraftwireError,
    InvalidRequestError,
    NoRoomError,
    UnauthenticatedError,
    UnavailableError,
)
from draftwire.runtime.error_details import DETAILS_KEY, DOMAIN, details_of


def unpacked(error: Exception) -> tuple[Status, ErrorInfo, BadRequest, RetryInfo]:
    ((key, data),) = details_of(error)
    assert key == DETAILS_KEY
    status = Status.FromString(data)
    found = ErrorInfo(), BadRequest(), RetryInfo()
    for part in status.details:
        assert sum(part.Unpack(one) for one in found) == 1
    return status, *found


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (InvalidRequestError("temperature must be in [0, 100]"), 3, "INVALID_PARAMETER"),
        (ContextLengthError.of(8, "max_tokens must be in 0..5"), 3, "CONTEXT_LENGTH_EXCEEDED"),
        (NoRoomError("full"), 8, "NO_ROOM"),
        (UnauthenticatedError("who?"), 16, "INVALID_TOKEN"),
        (UnavailableError("gone"), 14, "UNAVAILABLE"),
        (CompletionInterruptedError("gone", 7), 14, "COMPLETION_INTERRUPTED"),
    ],
)
def test_reason_and_code_are_those_of_the_error(error: DraftwireError, code: int, reason: str) -> None:
    for raised in (error, ExceptionGroup("outer", [error])):
        status, info, _, _ = unpacked(raised)
        assert (status.code, status.message) == (code, str(error))
        assert (info.reason, info.domain) == (reason, DOMAIN)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("temperature must be in [0, 100]", "temperature"),
        ("This model's maximum context length is 8 tokens; max_tokens must be in 0..5", "max_tokens"),
        ("tools[0] has no name", "tools"),
        ("the prompt is empty", ""),
    ],
)
def test_violation_names_the_field(message: str, field: str) -> None:
    _, _, bad, _ = unpacked(InvalidRequestError(message))
    assert [(one.field, one.description) for one in bad.field_violations] == [(field, message)]


def test_retry_and_progress_are_told() -> None:
    assert unpacked(NoRoomError("full", 2.5))[3].retry_delay.ToMilliseconds() == 2500
    assert dict(unpacked(CompletionInterruptedError("gone", 7))[1].metadata) == {"num_generated_tokens": "7"}


def test_unknown_errors_have_no_details() -> None:
    assert details_of(KeyError("secret")) == ()
