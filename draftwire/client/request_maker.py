"""Options of a completion, and the request made from them: shared by all clients."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypedDict

from google.protobuf.message import Message

from draftwire.client.completion import Completion
from draftwire.client.prompts import Prompt, Prompts, is_several, prompt_fields
from draftwire.client.retry_policy import RetryPolicy
from draftwire.errors import InvalidRequestError
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime.form_messages import form_to_proto
from draftwire.v1 import gateway_pb2

RESUME_S = 30.0


class SamplingOptions(TypedDict, total=False):
    """How the target's logits become the sampling distribution. None is the server's default everywhere."""

    temperature: float | None
    """Divides the logits; 0 is greedy."""
    top_k: int | None
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float | None
    """Keep the most likely tokens up to this probability mass."""
    min_p: float | None
    """Keep tokens whose probability is at least this fraction of the largest one."""
    repetition_penalty: float | None
    """Makes tokens of prompt and output less likely; 1 is off."""
    presence_penalty: float | None
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: float | None
    """Subtracted from a token's logit once for each time it was generated."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None
    """Only these tokens are possible; at least one."""
    min_tokens: int | None
    """Least number of tokens before a stop token may end the text; stop strings may end it earlier."""


class TextOptions(TypedDict, total=False):
    """Number of completions, where they end, how they are drawn, and what is reported about them."""

    num_choices: int | None
    """Completions of each prompt, independent of each other."""
    max_tokens: int | None
    """Most tokens to generate, 0 for none; without it, as many as the context has room for."""
    stop: str | Sequence[str] | None
    """Stop string or strings: the text ends before the first of them."""
    stop_token_ids: Sequence[int] | None
    """Generation ends with the first of these."""
    ignore_eos: bool | None
    """Continue after the model's own stop tokens."""
    seed: int | None
    """Makes the run repeatable, 0 to 2**64 - 1; by default the server draws one and reports it in the completion."""
    num_speculative_tokens: int | None
    """Draft tokens per round; 0 is plain decoding."""
    num_draft_nodes: int | None
    """Draft tokens of a token tree per round, whose paths have at most `num_speculative_tokens`; 0 drafts chains."""
    stop_below: float | None
    """Blocks end before a place in which the drafter gives no token so much probability; 0 ends none."""
    drafter: str | Sequence[str] | None
    """Names of what may draft: draft models, or strategies of the verifier such as "suffix"; by default all."""
    rejection_sample_method: str | None
    """Verification rule: "block", "token", "coupled" or "typical", which is lossy."""
    logprobs: int | None
    """Reports the target's log-probability of each token and of this many of the likeliest ones, 0 to 20."""
    prompt_logprobs: int | None
    """The same for each token of the prompt but the first."""
    logprobs_mode: str | None
    """"raw": before any processing; "processed": of the distribution that tokens are drawn from."""
    echo: bool | None
    """Begins each text with its prompt's."""
    token_details: bool | None
    """Reports each token's text and draft log-probability."""
    cache_salt: str | None
    """The server shares cached prefixes of this prompt only with requests of the same salt."""


class ChatOptions(TypedDict, total=False):
    """Options of prompts that are chat messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """Functions that the chat template describes to the model; see `draftwire.client.prompts`."""
    template_arguments: Mapping[str, Any] | None
    """Further variables of the chat template."""
    continue_final_message: bool | None
    """Continues the last message instead of answering it."""


class CallOptions(TypedDict, total=False):
    """Timeouts and retries of the client, in seconds."""

    timeout_s: float | None
    """Deadline of the whole request, from when it is sent; None is no deadline."""
    wait_for_server_s: float | None
    """How long to wait for the server to serve before the request is sent; None does not wait."""
    resume_s: float | None
    """How long to retry an interrupted completion; None is 30, and 0 raises the interruption."""


class Options(SamplingOptions, TextOptions, ChatOptions, CallOptions, total=False):
    """Keyword arguments of `stream`, `generate`, `generate_many` and `generate_batch`, in both clients."""

    structured_output: StructuredOutput | None
    """Constraint on the text, such as `StructuredOutput.json({"type": "object"})`."""


def make_request(prompt: Prompt | Prompts, options: Options) -> gateway_pb2.GenerateRequest:
    """Returns the request for the completions of one prompt, or of several.

    Raises:
        TypeError: there is no such option.
        InvalidRequestError: the prompt is invalid, or a value does not fit its field.
    """
    unknown = [name for name in options if name not in Options.__annotations__]
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; see draftwire.Options")
    check_seconds(options)
    text = _given(options, TextOptions)
    for name in ("stop", "drafter"):
        if isinstance(text.get(name), str):
            text[name] = [text[name]]
    with naming("prompt"):
        request = gateway_pb2.GenerateRequest(**prompt_fields(prompt, **_given(options, ChatOptions)))
    _set_fields(request, text)
    _set_fields(request.sampling, _given(options, SamplingOptions))
    if options.get("allowed_token_ids") is not None and not request.sampling.allowed_token_ids:
        raise InvalidRequestError("allowed_token_ids is empty: no token is possible")
    form = form_to_proto(options.get("structured_output"))
    if form is not None:
        request.sampling.structured_output.CopyFrom(form)
    return request


def check_seconds(options: Options) -> None:
    """Checks that the timeouts, which only the client uses, are numbers.

    Raises:
        InvalidRequestError: a timeout is not a number.
    """
    for name, value in _given(options, CallOptions).items():
        check_number(name, value)


def check_number(name: str, value: object) -> None:
    """Checks that a value is a number.

    Raises:
        InvalidRequestError: the value is not a number.
    """
    with naming(name):
        is_number = isinstance(value, Real) and not math.isnan(value)
    if not is_number:
        raise InvalidRequestError(f"{name}: a value is no number")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Converts conversion errors into an error that names the parameter and does not quote its value, which may be part
    of a prompt.

    Raises:
        InvalidRequestError: the block raised a conversion error.
    """
    try:
        yield
    except UnicodeError:
        raise InvalidRequestError(f"{what}: a text holds characters that UTF-8 cannot encode") from None
    except (ValueError, OverflowError):
        raise InvalidRequestError(f"{what}: a number is out of range") from None
    except (TypeError, AttributeError):
        raise InvalidRequestError(f"{what}: a value has the wrong type") from None


def _set_fields(message: Message, values: Mapping[str, Any]) -> None:
    """Sets fields one by one, because protobuf's errors do not name the field."""
    for name, value in values.items():
        with naming(name):
            message.MergeFrom(type(message)(**{name: value}))


def make_retry_policy(options: Options, num_gateways: int) -> RetryPolicy:
    """Returns the retry policy of a request."""
    resume_s = options.get("resume_s")
    return RetryPolicy(num_gateways, RESUME_S if resume_s is None else resume_s, options.get("timeout_s"))


def check_is_one(prompt: Prompt, options: Options) -> None:
    """Checks that one completion is requested.

    Raises:
        InvalidRequestError: several completions are requested.
    """
    if is_several(prompt) or options.get("num_choices") not in (None, 1):
        raise InvalidRequestError("generate returns one completion; generate_many returns several")


def by_prompt(completions: Sequence[Completion], options: Options) -> list[list[Completion]]:
    """Groups the completions by prompt."""
    num_choices = options.get("num_choices") or 1
    return [list(completions[first : first + num_choices]) for first in range(0, len(completions), num_choices)]


def _given(options: Options, kind: type) -> dict[str, Any]:
    values: Mapping[str, Any] = options
    return {name: values[name] for name in kind.__annotations__ if values.get(name) is not None}
