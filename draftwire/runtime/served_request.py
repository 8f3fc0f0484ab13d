"""The request of a user that the running task serves: its id, by which log lines are found, and what is known of it."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass

import structlog

REQUEST_ID = "x-request-id"
"""Header of HTTP and key of gRPC metadata, of requests and of responses."""

_VALID = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")
"""Ids of clients that are taken: no blanks, quotation marks or control characters, which would need escapes in logs."""


@dataclass(slots=True)
class ServedRequest:
    """One request, from its headers to its end. Used on the event loop only."""

    id: str
    """The client's id or, where it sent none that is valid, a random one of 32 digits."""
    caller: str = ""
    """Name of the caller's token; empty without tokens, or until the caller is known."""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    """Tokens of all choices so far."""


_served: ContextVar[ServedRequest | None] = ContextVar("served_request", default=None)


def served_request() -> ServedRequest | None:
    """Returns the request that this task and those that it was started from serve; None outside of requests."""
    return _served.get()


def served_request_id() -> str:
    """Returns the id of the served request; empty outside of requests."""
    request = _served.get()
    return "" if request is None else request.id


def note_caller(name: str) -> None:
    """Notes the name of the token that the served request came with; without one, nothing."""
    request = _served.get()
    if request is not None:
        request.caller = name


@contextmanager
def serving(given_id: str | None) -> Iterator[ServedRequest]:
    """Serves a request within the block: log lines get its id as `request_id`. One that is not valid is replaced."""
    is_valid = given_id is not None and _VALID.fullmatch(given_id) is not None
    request = ServedRequest(str(given_id) if is_valid else secrets.token_hex(16))
    token = _served.set(request)
    try:
        with structlog.contextvars.bound_contextvars(request_id=request.id):
            yield request
    finally:
        _served.reset(token)


def request_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata with which a call to a peer names the request that it is made for; empty if for none."""
    request = served_request()
    return () if request is None else ((REQUEST_ID, request.id),)


def context_of_no_request() -> Context:
    """Returns the current context without the request: for tasks that go on after it, whose lines are not about it."""
    context = copy_context()
    context.run(_served.set, None)
    context.run(structlog.contextvars.unbind_contextvars, "request_id")
    return context
