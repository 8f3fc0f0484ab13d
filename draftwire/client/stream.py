"""The stream of one request: what comes of its completions, over as many calls as it takes."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from draftwire.client.completion import CollectedCompletion, CollectedPrompt, Completion, Piece
from draftwire.client.patience import Patience
from draftwire.errors import (
    RETRY_KEY,
    DraftwireError,
    InvalidRequestError,
    ModelMismatchError,
    NoRoomError,
    ProtocolViolationError,
    UnauthenticatedError,
    UnavailableError,
)
from draftwire.v1 import gateway_pb2

_TOO_LARGE = "message larger than max"
"""Part of what gRPC says of a message above the receiver's limit. It has no status of its own for that."""

_ERRORS: dict[grpc.StatusCode, type[DraftwireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
}

StartCall = Callable[[gateway_pb2.GenerateRequest], Any]
"""Sends a request to the next gateway and returns the call."""


class CompletionStream:
    """Iterates over the pieces of one completion, or of several as they come; `completions` are there at its end.

    A stream that is interrupted is resumed from the tokens that have come, by the next gateway, or by the same one if
    there is no other: the pieces go on as if nothing had happened.
    """

    def __init__(self, start: StartCall, request: gateway_pb2.GenerateRequest, patience: Patience) -> None:
        """Use `Client.stream`."""
        self._start = start
        self._request = request
        self._patience = patience
        self._is_cancelled = False
        self._num_choices = request.num_choices if request.HasField("num_choices") else 1
        self._prompts: list[CollectedPrompt] = []  # none until something comes: the server may refuse so many
        self._call = start(request)

    @property
    def completions(self) -> list[Completion]:
        """Those that are finished, in the order of choices."""
        collected = (one.completion for one in self._collected)
        return [completion for completion in collected if completion is not None]

    @property
    def completion(self) -> Completion | None:
        """The first one; None until it is finished."""
        return next((one.completion for one in self._collected), None)

    def __iter__(self) -> Iterator[Piece]:
        """Yields the pieces. To stop before the end, by a break or an error, ends the generation: see `cancel`."""
        try:
            yield from self._pieces()
        finally:
            if self._is_missing and not self._is_cancelled:
                self.cancel()

    def _pieces(self) -> Iterator[Piece]:
        while self._is_missing:
            error: grpc.RpcError | None = None
            try:
                for response in self._call:
                    yield from self._take(response)
            except grpc.RpcError as raised:
                error = raised
            if self._is_missing:
                self._resume(error)

    def cancel(self) -> None:
        """Ends the generation; the server frees what it held."""
        self._is_cancelled = True
        self._call.cancel()

    @property
    def _collected(self) -> Iterator[CollectedCompletion]:
        return (completion for prompt in self._prompts for completion in prompt.completions)

    @property
    def _is_missing(self) -> bool:
        """Whether something is to come."""
        return not self._prompts or any(one.completion is None for one in self._collected)

    def _take(self, response: gateway_pb2.GenerateResponse) -> Iterator[Piece]:
        """Yields what is new in a response. What is known already is no progress.

        Raises:
            ProtocolViolationError: it is not what was asked for.
        """
        if not self._prompts:
            firsts = range(0, max(1, len(self._request.prompts.prompts)) * self._num_choices, self._num_choices)
            choices = [range(first, first + self._num_choices) for first in firsts]
            self._prompts = [CollectedPrompt(self._request, of_prompt) for of_prompt in choices]
        pieces: list[Piece] = []
        match response.WhichOneof("event"):
            case "delta":
                pieces = [self._of(response.delta.choice).take(response.delta)]
            case "finish":
                self._of(response.finish.choice).finish(response.finish)
                self._patience.renew()
            case "prompt_logprobs":
                piece = self._prompt_of(response.prompt_logprobs.choice).take_logprobs(response.prompt_logprobs)
                pieces = [piece] if piece is not None else []
            case "prompt_echo":
                pieces = self._prompt_of(response.prompt_echo.choice).take_echo(response.prompt_echo)
        if pieces:
            self._patience.renew()
        yield from pieces

    def _prompt_of(self, choice: int) -> CollectedPrompt:
        index = choice // self._num_choices
        if index >= len(self._prompts):
            raise ProtocolViolationError(f"the gateway tells of choice {choice}, which was not asked for")
        return self._prompts[index]

    def _of(self, choice: int) -> CollectedCompletion:
        """Returns what has come of a choice that is not finished."""
        found = self._prompt_of(choice).completions[choice % self._num_choices]
        if found.completion is not None:
            raise ProtocolViolationError(f"the gateway tells more of choice {choice}, which is finished")
        return found

    def _resume(self, error: grpc.RpcError | None) -> None:
        """Starts anew from the tokens that have come, after a pause. Without an error the stream just ended.

        Raises:
            DraftwireError: that is of no use, or was tried for too long.
        """
        refusal = UnavailableError("the stream ended without a finish") if error is None else error_of(error)
        is_final = error is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        is_lost = isinstance(refusal, UnavailableError | NoRoomError) and not is_final and not self._is_cancelled
        if not is_lost or not self._patience.wait(refusal):
            raise refusal from error
        came = [one.resume() for one in self._collected]
        del self._request.generated_choices[:]
        self._request.generated_choices.extend(one for one in came if one is not None)
        self._call = self._start(self._request)


def error_of(error: grpc.RpcError) -> DraftwireError:
    """Returns the error that a gateway's status stands for."""
    code = error.code()
    details = error.details() or code.name
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:  # asking again does not help
        return InvalidRequestError(f"the request is too large: {details} bytes")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        hints = {item.key: item.value for item in error.trailing_metadata() or ()}
        return NoRoomError.hinted(details, hints.get(RETRY_KEY))
    return _ERRORS.get(code, UnavailableError)(details)
