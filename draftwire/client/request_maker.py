"""What can be said of a completion besides its prompt, and the request that says it: one place for all clients."""

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
from draftwire.method.keys import new_seed
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime.form_messages import form_to_proto
from draftwire.v1 import gateway_pb2

RESUME_S = 30.0


class SamplingOptions(TypedDict, total=False):
    """How the target's distribution is made. Everywhere, None is the server's default."""

    temperature: float | None
    """Flattens or sharpens; 0 is greedy."""
    top_k: int | None
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float | None
    """Keep the most likely tokens up to this mass."""
    min_p: float | None
    """Keep tokens at least so many times as likely as the most likely one."""
    repetition_penalty: float | None
    """Makes tokens of prompt and output less likely; 1 is off."""
    presence_penalty: float | None
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: float | None
    """Subtracted from a token's logit once for each time it was generated."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None
    """No other token is possible; at least one."""
    min_tokens: int | None
    """Nothing ends the text before so many tokens, but stop strings do."""


class TextOptions(TypedDict, total=False):
    """How many texts, where they end, how they are drawn, and what is reported of them."""

    num_choices: int | None
    """Completions of each prompt, independent of each other."""
    max_tokens: int | None
    """Most tokens to generate, or none at 0; without it, what the context leaves."""
    stop: str | Sequence[str] | None
    """The text ends before this, or before the first of these."""
    stop_token_ids: Sequence[int] | None
    """Generation ends with the first of these."""
    ignore_eos: bool | None
    """The model's own stop tokens end nothing."""
    seed: int | None
    """Makes the run repeatable, 0 to 2**64 - 1; without it, one is drawn, and the completion says which."""
    num_speculative_tokens: int | None
    """Draft tokens per round; 0 is plain decoding."""
    rejection_sample_method: str | None
    """Verification rule: "block", "token", "coupled" or "typical", which is lossy."""
    logprobs: int | None
    """Reports the target's log-probability of each token and so many of the likeliest ones, 0 to 20."""
    prompt_logprobs: int | None
    """The same for each token of the prompt but the first."""
    logprobs_mode: str | None
    """"raw", before any processing, or "processed", of what tokens are drawn from."""
    echo: bool | None
    """Begins each text with its prompt's."""
    token_details: bool | None
    """Tells of each token what text it has and what the drafter gave it."""
    cache_salt: str | None
    """What the server computes for this prompt is shared with requests of the same salt only."""


class ChatOptions(TypedDict, total=False):
    """What belongs to prompts that are chat messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """Functions that the chat template describes to the model; see `draftwire.client.prompts`."""
    template_arguments: Mapping[str, Any] | None
    """Further variables of the chat template."""
    continue_final_message: bool | None
    """Goes on with the last message instead of answering it."""


class CallOptions(TypedDict, total=False):
    """How long the client tries, seconds."""

    timeout_s: float | None
    """Deadline for all of it, from when it is sent; None is none."""
    wait_for_server_s: float | None
    """How long the server may take to come up before the request is sent; None does not ask."""
    resume_s: float | None
    """How long what was interrupted is tried again; None is 30, and 0 raises the interruption."""


class Options(SamplingOptions, TextOptions, ChatOptions, CallOptions, total=False):
    """Everything that `stream`, `generate`, `generate_many` and `generate_batch` take as keywords, in both clients."""

    structured_output: StructuredOutput | None
    """The form that the text has, such as `StructuredOutput.json({"type": "object"})`."""


def make_request(prompt: Prompt | Prompts, options: Options) -> gateway_pb2.GenerateRequest:
    """Returns the request for the completions of one prompt, or of several.

    Raises:
        TypeError: there is no such option.
        InvalidRequestError: the prompt is none, or a value cannot be sent.
    """
    unknown = [name for name in options if name not in Options.__annotations__]
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; see draftwire.Options")
    check_seconds(options)
    text = _given(options, TextOptions)
    text.setdefault("seed", new_seed())  # the same if it is resumed
    if isinstance(stop := text.get("stop"), str):
        text["stop"] = [stop]
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
    """Makes sure that what the client itself goes by are numbers.

    Raises:
        InvalidRequestError: one is none.
    """
    for name, value in _given(options, CallOptions).items():
        check_number(name, value)


def check_number(name: str, value: object) -> None:
    """Makes sure that a value that the client itself goes by is a number.

    Raises:
        InvalidRequestError: it is none.
    """
    with naming(name):
        is_number = isinstance(value, Real) and not math.isnan(value)
    if not is_number:
        raise InvalidRequestError(f"{name}: a value is no number")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Says which value it was that does not fit, and not the value: it may be part of a prompt.

    Raises:
        InvalidRequestError: it did not.
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
    """Sets fields one by one: protobuf does not say which one a value does not fit."""
    for name, value in values.items():
        with naming(name):
            message.MergeFrom(type(message)(**{name: value}))


def make_retry_policy(options: Options, num_gateways: int) -> RetryPolicy:
    """Returns how long the completions are tried."""
    resume_s = options.get("resume_s")
    return RetryPolicy(num_gateways, RESUME_S if resume_s is None else resume_s, options.get("timeout_s"))


def check_is_one(prompt: Prompt, options: Options) -> None:
    """Makes sure that one completion is asked for.

    Raises:
        InvalidRequestError: it is several.
    """
    if is_several(prompt) or options.get("num_choices") not in (None, 1):
        raise InvalidRequestError("generate returns one completion; generate_many returns several")


def by_prompt(completions: Sequence[Completion], options: Options) -> list[list[Completion]]:
    """Returns the completions of each prompt."""
    num_choices = options.get("num_choices") or 1
    return [list(completions[first : first + num_choices]) for first in range(0, len(completions), num_choices)]


def _given(options: Options, kind: type) -> dict[str, Any]:
    """Returns those of a kind that say something."""
    said: Mapping[str, Any] = options
    return {name: said[name] for name in kind.__annotations__ if said.get(name) is not None}
