"""The generating routes: conversion of their bodies to requests of the core."""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import NUMBERS, SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import (
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    Conversing,
    GenerateBody,
    OutputForm,
    StreamOptions,
    ToolBody,
)
from draftwire_gateway.http.choice_deltas import ResponseOptions
from draftwire_gateway.http.declared_properties import closed
from draftwire_gateway.http.error_bodies import HTTP_NAMES, renamed
from draftwire_gateway.http.openai_types import ChatFormatter, CompletionFormatter, ResponseFormatter, ResponseWriter
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.http.responses_body import ResponsesBody
from draftwire_gateway.http.responses_writer import ResponsesWriter, Writer
from draftwire_gateway.http.tool_use import tool_use
from draftwire_gateway.requested_generation import GeneratedChoice, RequestedGeneration
from draftwire_gateway.text.conversation import ChatTurn, Conversation, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class Route(Generic[Body]):
    """A route that generates text."""

    body: type[Body]
    """Model of the request body."""
    options: Callable[[Body, GatewayCore], ResponseOptions]
    """Returns what the response reports beside the text, and how its text is read. Raises InvalidRequestError if the
    body asks for what cannot be had."""
    requested: Callable[[Body, ResponseOptions, GatewayCore, str], Awaitable[RequestedGeneration]]
    """Tokenises the prompts, in turn with those of other callers than the named one, and returns the request for the
    core. Raises InvalidRequestError if a value is out of range or a prompt invalid, NoRoomError if too many
    conversations are being rendered, or texts tokenised."""
    writer: Callable[[Body, ResponseOptions], Writer]
    """Returns what writes the response."""
    names: Callable[[Body], Mapping[str, str]] = lambda _: HTTP_NAMES
    """Returns this route's names of parameters that the core's errors name differently."""
    num_prompts: Callable[[Body], int] = lambda _: 1


def _completion_options(body: CompletionBody, _core: GatewayCore) -> ResponseOptions:
    ids = body.return_token_ids
    return ResponseOptions(body.n, body.logprobs, body.prompt_logprobs, body.token_details, returns_ids=ids)


async def _requested_completion(
    body: CompletionBody, _options: ResponseOptions, core: GatewayCore, caller: str
) -> RequestedGeneration:
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


def _chat_options(body: ChatBody, core: GatewayCore) -> ResponseOptions:
    tools = tool_use(body, core.tool_syntax)
    if tools is not None and any(one.token_ids for one in body.generated_choices):
        raise InvalidRequestError("generated_choices: answers in which tool calls are read cannot be resumed")
    ids = body.return_token_ids
    return ResponseOptions(body.n, _num_top(body), body.prompt_logprobs, body.token_details, tools, ids)


async def _requested_chat(
    body: ChatBody, options: ResponseOptions, core: GatewayCore, caller: str
) -> RequestedGeneration:
    tools = options.tools
    form = _chat_form(body) if tools is None else tools.form
    conversation = conversation_of(body, body.messages, body.offered_tools)
    return RequestedGeneration(
        prompts=[await core.render_chat(conversation, caller, must_call=body.must_call)],
        sampling=_sampling(body, form),
        shown_tokens=frozenset() if tools is None else tools.shown_tokens,
        caller=caller,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_num_top(body),
        prompt_logprobs=body.prompt_logprobs,
        token_details=body.token_details,
        **_common(body),
    )


def _chat_names(body: ChatBody) -> Mapping[str, str]:
    """Returns the HTTP names of parameters; the prompt is `messages`, the form may be that of tool calls."""
    length = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    form = {"structured_output": "tools"} if body.offered_tools and not body.has_form else {}
    return {**HTTP_NAMES, **length, **form, "the prompt": "messages"}


def _writer(formatter: ResponseFormatter, body: GenerateBody, options: ResponseOptions) -> Writer:
    wanted = body.stream_options or StreamOptions()
    return ResponseWriter(
        formatter,
        options,
        body.model,
        reports_usage=wanted.include_usage,
        counts_on=wanted.include_usage and wanted.continuous_usage_stats,
    )


COMPLETIONS: Route[CompletionBody] = Route(
    CompletionBody,
    options=_completion_options,
    requested=_requested_completion,
    writer=partial(_writer, CompletionFormatter()),
    num_prompts=lambda body: len(body.prompt),
)
"""POST /v1/completions."""
CHAT: Route[ChatBody] = Route(
    ChatBody,
    options=_chat_options,
    requested=_requested_chat,
    writer=partial(_writer, ChatFormatter()),
    names=_chat_names,
)
"""POST /v1/chat/completions."""
RESPONSES: Route[ResponsesBody] = Route(
    ResponsesBody,
    options=lambda body, core: _chat_options(body.chat, core),
    requested=lambda body, options, core, caller: _requested_chat(body.chat, options, core, caller),
    writer=lambda body, _: ResponsesWriter(body),
    names=lambda body: {**_chat_names(body.chat), "max_tokens": "max_output_tokens", "the prompt": "input"},
)
"""POST /v1/responses: a conversation in other words."""


@contextmanager
def in_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the parameters in the errors of a block: see `Route.names`.

    Raises:
        RefusedError: the block raised an `InvalidRequestError`.
    """
    try:
        yield
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
        "num_speculative_tokens": body.num_speculative_tokens,
        "num_draft_nodes": body.num_draft_nodes,
        "stop_below": body.stop_below,
        "drafter": tuple(body.drafter),
        "rule": body.rejection_sample_method,
        "cache_salt": body.cache_salt,
        "generated_choices": tuple(
            GeneratedChoice(one.choice, tuple(one.token_ids), one.is_finished) for one in body.generated_choices
        ),
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
    return StructuredOutput.json(closed(schema))


def _num_top(body: ChatBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def conversation_of(body: Conversing, messages: Sequence[ChatMessage], tools: Sequence[ToolBody]) -> Conversation:
    """Returns what a chat template renders for a request."""
    return Conversation(
        turns=tuple(map(_turn, messages)),
        tools=tuple(Tool(one.function.name, one.function.description, one.function.parameters) for one in tools),
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


def check_model(model: str, names: Sequence[str], drafters: Collection[str]) -> None:
    """Checks that a request names the target by one of its names.

    Raises:
        RefusedError: it names another model.
    """
    if model in names:
        return
    if model in drafters:
        message = f"model: this is the model of a drafter, and drafters only draft; ask for {names[0]}"
        raise RefusedError(400, message, code="model_is_a_drafter", param="model")
    raise RefusedError(404, f"there is no such model here; ask for {names[0]}", code="model_not_found", param="model")
