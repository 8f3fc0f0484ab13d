"""State of a request over all its calls, and what the streams of both clients have in common."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from draftwire.client.call_errors import Interruption
from draftwire.client.completion import CollectedCompletion, CollectedPrompt, Completion, Piece
from draftwire.client.retry_policy import RetryPolicy
from draftwire.errors import ProtocolViolationError
from draftwire.v1 import gateway_pb2

StartCall = Callable[[gateway_pb2.GenerateRequest, float | None], Any]
"""Sends a request to the next gateway, with a timeout in seconds, and returns the call, of `grpc` or `grpc.aio`."""


class RequestProgress:
    """Collects the completions of a request, and prepares the request that resumes them.

    Attributes:
        request: the message of the next call.
        retry_policy: when to make the next call. Its time begins with the first call.
    """

    def __init__(self, request: gateway_pb2.GenerateRequest, retry_policy: RetryPolicy) -> None:
        self.request = request
        self.retry_policy = retry_policy
        self._num_choices = request.num_choices if request.HasField("num_choices") else 1
        self._prompts: list[CollectedPrompt] = []  # empty until the first response: the server may refuse so many

    @property
    def completions(self) -> list[Completion]:
        """The finished completions, in the order of choices."""
        collected = (one.completion for one in self._collected)
        return [completion for completion in collected if completion is not None]

    @property
    def completion(self) -> Completion | None:
        """The first completion; None until it is finished."""
        return next((one.completion for one in self._collected), None)

    @property
    def is_missing(self) -> bool:
        """Whether a completion is not finished."""
        return not self._prompts or any(one.completion is None for one in self._collected)

    def take(self, response: gateway_pb2.GenerateResponse) -> list[Piece]:
        """Returns the new pieces of a response. Content that a previous call delivered is left out, and does not renew
        the retry policy.

        Raises:
            ProtocolViolationError: the response does not fit the request.
        """
        if not self._prompts:
            firsts = range(0, max(1, len(self.request.prompts.prompts)) * self._num_choices, self._num_choices)
            choices = [range(first, first + self._num_choices) for first in firsts]
            self._prompts = [CollectedPrompt(self.request, of_prompt) for of_prompt in choices]
        pieces: list[Piece] = []
        match response.WhichOneof("event"):
            case "delta":
                pieces = [self._of(response.delta.choice).take(response.delta)]
            case "finish":
                self._of(response.finish.choice).finish(response.finish)
                self.retry_policy.renew()
            case "prompt_logprobs":
                piece = self._prompt_of(response.prompt_logprobs.choice).take_logprobs(response.prompt_logprobs)
                pieces = [piece] if piece is not None else []
            case "prompt_echo":
                pieces = self._prompt_of(response.prompt_echo.choice).take_echo(response.prompt_echo)
        if pieces:
            self.retry_policy.renew()
        return pieces

    def resume(self, interruption: Interruption) -> float | None:
        """Prepares `request` to resume from the received tokens; without a seed of its own, under another one.

        Returns:
            After how many seconds to send it; None if the interruption is permanent or was retried for too long.
        """
        pause_s = self.retry_policy.pause_after(interruption.error) if interruption.may_pass else None
        if pause_s is not None:
            generated = [completion.resume() for completion in self._collected]
            del self.request.generated_choices[:]
            self.request.generated_choices.extend(choice for choice in generated if choice is not None)
        return pause_s

    @property
    def _collected(self) -> Iterator[CollectedCompletion]:
        return (completion for prompt in self._prompts for completion in prompt.completions)

    def _prompt_of(self, choice: int) -> CollectedPrompt:
        index = choice // self._num_choices
        if index >= len(self._prompts):
            raise ProtocolViolationError(f"the gateway tells of choice {choice}, which was not asked for")
        return self._prompts[index]

    def _of(self, choice: int) -> CollectedCompletion:
        """Returns the collected state of a choice that is not finished."""
        found = self._prompt_of(choice).completions[choice % self._num_choices]
        if found.completion is not None:
            raise ProtocolViolationError(f"the gateway tells more of choice {choice}, which is finished")
        return found


class RequestStream:
    """The calls for a request, one after the other, and the pieces that nobody has read yet."""

    def __init__(self, start: StartCall, progress: RequestProgress) -> None:
        self._start = start
        self._progress = progress
        self._pieces: deque[Piece] = deque()
        self._is_over = False
        self._call: Any = None

    @property
    def completions(self) -> list[Completion]:
        """The finished completions, in the order of choices."""
        return self._progress.completions

    @property
    def completion(self) -> Completion | None:
        """The first completion; None until it is finished."""
        return self._progress.completion

    def _next_call(self) -> Any:
        self._call = self._start(self._progress.request, self._progress.retry_policy.left_s)
        return self._call
