"""The two generating routes: conversion of their bodies to requests of the core."""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import NUMBERS, SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import (
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerateBody,
    OutputForm,
    ToolBody,
)
from draftwire_gateway.http.choice_deltas import ResponseOptions
from draftwire_gateway.http.error_bodies import HTTP_NAMES, renamed
from draftwire_gateway.http.openai_types import ChatFormatter, CompletionFormatter, ResponseFormatter
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.session.generation import RequestedGeneration
from draftwire_gateway.text.conversation import ChatTurn, Conversation, Tool, ToolCall


class Route(Protocol, Generic[Body]):
    """One of the two routes that generate text."""

    @property
    def body(self) -> type[Body]:
        """Model of the request body."""

    @property
    def formatter(self) -> ResponseFormatter:
        """Format of the response."""

    def num_prompts(self, body: Body) -> int:
        """Returns the number of prompts."""

    def options(self, body: Body) -> ResponseOptions:
        """Returns what the response reports beside the text."""

    def names(self, body: Body) -> Mapping[str, str]:
        """Returns this route's names of parameters that the core's errors name differently."""

    async def requested(self, body: Body, core: GatewayCore, caller: str) -> RequestedGeneration:
        """Tokenises the prompts, and returns the request for the core.

        Raises:
            InvalidRequestError: a value is out of range, or a prompt is invalid.
            NoRoomError: too many conversations are being rendered, or texts tokenised.
        """


@dataclass(frozen=True, slots=True)
class Completions:
    """POST /v1/completions."""

    body: type[CompletionBody] = CompletionBody
    formatter: ResponseFormatter = field(default_factory=CompletionFormatter)

    def num_prompts(self, body: CompletionBody) -> int:
        """Returns the number of prompts."""
        return len(body.prompt)

    def options(self, body: CompletionBody) -> ResponseOptions:
        """Returns what the response reports beside the text."""
        return ResponseOptions(body.n, body.logprobs, body.prompt_logprobs, body.token_details)

    def names(self, body: CompletionBody) -> Mapping[str, str]:
        """Returns the HTTP names of parameters."""
        return HTTP_NAMES

    async def requested(self, body: CompletionBody, core: GatewayCore, caller: str) -> RequestedGeneration:
        """Tokenises the prompts that are text, and returns the request for the core."""
        prompts = [await core.tokenize(prompt, caller) if isinstance(prompt, str) else prompt for prompt in body.prompt]
        # An echo with log-probabilities includes those of the prompt.
        tops = [body.prompt_logprobs, body.logprobs if body.echo else None]
        return RequestedGeneration(
            prompts=prompts,
            sampling=_sampling(body, _form(body.structured_output)),
            caller=caller,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=max((top for top in tops if top is not None), default=None),
            echo=body.echo,
            token_details=body.token_details or body.logprobs is not None,  # offsets in the text
            **_common(body),
        )


@dataclass(frozen=True, slots=True)
class Chat:
    """POST /v1/chat/completions."""

    body: type[ChatBody] = ChatBody
    formatter: ResponseFormatter = field(default_factory=ChatFormatter)

    def num_prompts(self, body: ChatBody) -> int:
        """Returns 1: a request holds one conversation."""
        return 1

    def options(self, body: ChatBody) -> ResponseOptions:
        """Returns what the response reports beside the text."""
        return ResponseOptions(body.n, _num_top(body), body.prompt_logprobs, body.token_details)

    def names(self, body: ChatBody) -> Mapping[str, str]:
        """Returns the HTTP names of parameters; the prompt is `messages`."""
        length = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {**HTTP_NAMES, **length, "the prompt": "messages"}

    async def requested(self, body: ChatBody, core: GatewayCore, caller: str) -> RequestedGeneration:
        """Renders the conversation, and returns the request for the core."""
        return RequestedGeneration(
            prompts=[await core.render_chat(_conversation(body), caller)],
            sampling=_sampling(body, _chat_form(body)),
            caller=caller,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=_num_top(body),
            prompt_logprobs=body.prompt_logprobs,
            token_details=body.token_details,
            **_common(body),
        )


async def in_names(names: Mapping[str, str], work: Coroutine[Any, Any, None]) -> None:
    """Awaits work, and renames the parameters in its errors: see `Route.names`.

    Raises:
        RefusedError: the work raised an `InvalidRequestError`.
    """
    try:
        await work
    except InvalidRequestError as error:
        raise renamed(error, names) from error


def _common(body: GenerateBody) -> dict[str, Any]:
    """Returns the parameters that both routes share."""
    return {
        "num_choices": body.n,
        "stop": tuple(body.stop),
        "stop_token_ids": tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "seed": body.seed,
        "has_random_seed": body.has_random_seed,
        "num_speculative_tokens": body.num_speculative_tokens,
        "drafter": tuple(body.drafter),
        "rule": body.rejection_sample_method,
        "cache_salt": body.cache_salt,
        "logprobs_mode": body.logprobs_mode,
    }


def _sampling(body: GenerateBody, form: StructuredOutput | None) -> SamplingParams:
    numbers = {name: getattr(body, name) for name in NUMBERS}
    return SamplingParams(
        **numbers,
        logit_bias=tuple(sorted(body.logit_bias.items())),
        allowed_token_ids=None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids),
        structured_output=form,
    )


def _form(wanted: OutputForm | None) -> StructuredOutput | None:
    if wanted is None:
        return None
    if wanted.json_schema is not None:
        return StructuredOutput.json(wanted.json_schema)
    if wanted.regex is not None:
        return StructuredOutput.regex(wanted.regex)
    if wanted.choice is not None:
        return StructuredOutput.choice(wanted.choice)
    assert wanted.grammar is not None, "one of the four is there"
    return StructuredOutput.grammar(wanted.grammar)


def _chat_form(body: ChatBody) -> StructuredOutput | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return _form(body.structured_output)
    schema = '{"type": "object"}' if wanted.json_schema is None else wanted.json_schema.json_schema
    return StructuredOutput.json(schema)


def _num_top(body: ChatBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def _conversation(body: ChatBody) -> Conversation:
    return Conversation(
        turns=tuple(map(_turn, body.messages)),
        tools=tuple(map(_tool, body.tools)) if body.tool_choice == "auto" else (),
        template_arguments="" if body.chat_template_kwargs == "{}" else body.chat_template_kwargs,
        continues_last=body.continue_final_message,
    )


def _turn(message: ChatMessage) -> ChatTurn:
    return ChatTurn(
        role=message.role,
        content="".join(part.text for part in message.content),
        name=message.name,
        tool_calls=tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _tool(tool: ToolBody) -> Tool:
    function = tool.function
    return Tool(function.name, function.description, function.parameters)


def model_fault(model: str, target: str, drafters: Sequence[str]) -> RefusedError | None:
    """Returns why a request cannot name this model; None if it can."""
    if model == target:
        return None
    if model in drafters:
        message = f"model: this is the model of a drafter, and drafters only draft; ask for {target}"
        return RefusedError(400, message, code="model_is_a_drafter", param="model")
    return RefusedError(404, f"there is no such model here; ask for {target}", code="model_not_found", param="model")
