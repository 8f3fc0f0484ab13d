"""Errors in OpenAI's format: one table from exception class to HTTP status."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from draftwire import errors
from draftwire_gateway.http.body import ChatBody, CompletionBody
from draftwire_gateway.http.refusal import RefusedError

UNAVAILABLE_RETRY_S = 1.0
"""Retry hint while the gateway or a peer is not ready."""

HTTP_NAMES = {"num_choices": "n", "template_arguments": "chat_template_kwargs"}
"""HTTP names of the parameters that have another name in gRPC."""

_WORD = re.compile(r"[a-z_]+(?![a-z_'])")
_PARAMETERS = frozenset([*CompletionBody.model_fields, *ChatBody.model_fields])


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    type: str
    code: str | None = None


_OPAQUE = "internal error"
_INTERNAL = _Kind(500, "api_error", "internal_error")
_PEER_FAILED = _Kind(500, "api_error", "peer_failed")
_TABLE: dict[type[BaseException], _Kind] = {
    errors.InvalidRequestError: _Kind(400, "invalid_request_error"),
    errors.ContextLengthError: _Kind(400, "invalid_request_error", "context_length_exceeded"),
    errors.UnauthenticatedError: _Kind(401, "authentication_error", "invalid_api_key"),
    # Lost by a peer: clients do not address sessions.
    errors.UnknownSessionError: _Kind(503, "service_unavailable_error", "session_lost"),
    errors.ProtocolViolationError: _PEER_FAILED,
    errors.ModelMismatchError: _PEER_FAILED,
    errors.WrongRoleError: _PEER_FAILED,
    errors.NoRoomError: _Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.UnavailableError: _Kind(503, "service_unavailable_error", "unavailable"),
    TimeoutError: _Kind(504, "service_unavailable_error", "timeout"),
}


def _root_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _kind_of(cause: BaseException) -> _Kind:
    if isinstance(cause, RefusedError):
        return _Kind(cause.status, "invalid_request_error", cause.code)
    return next((_TABLE[kind] for kind in type(cause).__mro__ if kind in _TABLE), _INTERNAL)


def is_expected(error: BaseException) -> bool:
    """Whether an error has a status of its own, and so needs no traceback in the log."""
    return _kind_of(_root_cause(error)) is not _INTERNAL


def status_of(error: BaseException) -> int:
    """Returns the HTTP status of an error."""
    return _kind_of(_root_cause(error)).status


def body_of(error: BaseException) -> bytes:
    """Returns the response body of an error, as JSON. Errors outside the table stay opaque."""
    cause = _root_cause(error)
    kind = _kind_of(cause)
    is_own = isinstance(cause, errors.DraftwireError | RefusedError)
    message = _with_names(HTTP_NAMES, str(cause)) if is_own else _OPAQUE
    param = cause.param if isinstance(cause, RefusedError) else _param_of(message) if kind.status == 400 else None
    fields = {"message": message, "type": kind.type, "param": param, "code": kind.code}
    return json.dumps({"error": fields}).encode()


def renamed(error: errors.InvalidRequestError, names: Mapping[str, str]) -> RefusedError:
    """Returns an error whose message uses a route's parameter names: the keys of `names` become their values."""
    message = _with_names(names, str(error))
    return RefusedError(400, message, code=_kind_of(error).code, param=_param_of(message))


def _with_names(names: Mapping[str, str], message: str) -> str:
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match.group()], message)


def headers_of(error: BaseException) -> list[tuple[bytes, bytes]]:
    """Returns the headers retry-after or www-authenticate, if the error has one."""
    cause = _root_cause(error)
    if isinstance(cause, errors.UnauthenticatedError):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(cause, errors.NoRoomError):
        wait_s = cause.retry_after_s
    elif status_of(cause) == 503:
        wait_s = UNAVAILABLE_RETRY_S
    else:
        return []
    whole = str(max(1, math.ceil(wait_s))).encode()
    # The openai package reads the second header, in milliseconds.
    return [(b"retry-after", whole), (b"retry-after-ms", str(math.ceil(wait_s * 1e3)).encode())]


def _param_of(message: str) -> str | None:
    """Returns the first parameter that a message names; None if it names none."""
    return next((word for word in _WORD.findall(message) if word in _PARAMETERS), None)
