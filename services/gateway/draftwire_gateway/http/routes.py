"""The generating routes: conversion of their bodies to requests of the core."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic

from typing_extensions import override

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
    ToolBody,
)
from draftwire_gateway.http.choice_deltas import ResponseOptions
from draftwire_gateway.http.error_bodies import HTTP_NAMES, renamed
from draftwire_gateway.http.openai_types import (
    ChatFormatter,
    CompletionFormatter,
    ResponseFormatter,
    ResponseWriter,
    Writer,
)
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.http.responses_body import ResponsesBody
from draftwire_gateway.http.responses_writer import ResponsesWriter
from draftwire_gateway.http.tool_use import tool_use
from draftwire_gateway.requested_generation import GeneratedChoice, RequestedGeneration
from draftwire_gateway.text.conversation import ChatTurn, Conversation, Tool, ToolCall


class Route(ABC, Generic[Body]):
    """A route that generates text."""

    body: type[Body]
    """Model of the request body."""

    def num_prompts(self, body: Body) -> int:
        """Returns the number of prompts."""
        return 1

    @abstractmethod
    def options(self, body: Body, core: GatewayCore) -> ResponseOptions:
        """Returns what the response reports beside the text, and how its text is read.

        Raises:
            InvalidRequestError: the body asks for what cannot be had.
        """

    @abstractmethod
    def writer(self, body: Body, options: ResponseOptions) -> Writer:
        """Returns what writes the response."""

    def names(self, body: Body) -> Mapping[str, str]:
        """Returns this route's names of parameters that the core's errors name differently."""
        return HTTP_NAMES

    @abstractmethod
    async def requested(
        self, body: Body, options: ResponseOptions, core: GatewayCore, caller: str
    ) -> RequestedGeneration:
        """Tokenises the prompts, and returns the request for the core.

        Raises:
            InvalidRequestError: a value is out of range, or a prompt is invalid.
            NoRoomError: too many conversations are being rendered, or texts tokenised.
        """


class Completions(Route[CompletionBody]):
    """POST /v1/completions."""

    body = CompletionBody

    @override
    def num_prompts(self, body: CompletionBody) -> int:
        return len(body.prompt)

    @override
    def options(self, body: CompletionBody, core: GatewayCore) -> ResponseOptions:
        ids = body.return_token_ids
        return ResponseOptions(body.n, body.logprobs, body.prompt_logprobs, body.token_details, returns_ids=ids)

    @override
    def writer(self, body: CompletionBody, options: ResponseOptions) -> Writer:
        return _writer(CompletionFormatter(), body, options)

    @override
    async def requested(
        self, body: CompletionBody, options: ResponseOptions, core: GatewayCore, caller: str
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


class Chat(Route[ChatBody]):
    """POST /v1/chat/completions."""

    body = ChatBody

    @override
    def options(self, body: ChatBody, core: GatewayCore) -> ResponseOptions:
        tools = tool_use(body, core.tool_syntax)
        if tools is not None and any(one.token_ids for one in body.generated_choices):
            raise InvalidRequestError("generated_choices: answers in which tool calls are read cannot be resumed")
        ids = body.return_token_ids
        return ResponseOptions(body.n, _num_top(body), body.prompt_logprobs, body.token_details, tools, ids)

    @override
    def writer(self, body: ChatBody, options: ResponseOptions) -> Writer:
        return _writer(ChatFormatter(), body, options)

    @override
    def names(self, body: ChatBody) -> Mapping[str, str]:
        """Returns the HTTP names of parameters; the prompt is `messages`, the form may be that of tool calls."""
        length = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        form = {"structured_output": "tools"} if body.offered_tools and not body.has_form else {}
        return {**HTTP_NAMES, **length, **form, "the prompt": "messages"}

    @override
    async def requested(
        self, body: ChatBody, options: ResponseOptions, core: GatewayCore, caller: str
    ) -> RequestedGeneration:
        tools = options.tools
        form = _chat_form(body) if tools is None else tools.form
        return RequestedGeneration(
            prompts=[await core.render_chat(conversation_of(body, body.messages, body.offered_tools), caller)],
            sampling=_sampling(body, form),
            shown_tokens=frozenset() if tools is None else tools.shown_tokens,
            caller=caller,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=_num_top(body),
            prompt_logprobs=body.prompt_logprobs,
            token_details=body.token_details,
            **_common(body),
        )


class Responses(Route[ResponsesBody]):
    """POST /v1/responses: a conversation in other words."""

    body = ResponsesBody

    @override
    def options(self, body: ResponsesBody, core: GatewayCore) -> ResponseOptions:
        return Chat().options(body.chat, core)

    @override
    def writer(self, body: ResponsesBody, options: ResponseOptions) -> Writer:
        return ResponsesWriter(body)

    @override
    def names(self, body: ResponsesBody) -> Mapping[str, str]:
        return {**Chat().names(body.chat), "max_tokens": "max_output_tokens", "the prompt": "input"}

    @override
    async def requested(
        self, body: ResponsesBody, options: ResponseOptions, core: GatewayCore, caller: str
    ) -> RequestedGeneration:
        return await Chat().requested(body.chat, options, core, caller)


def _writer(formatter: ResponseFormatter, body: GenerateBody, options: ResponseOptions) -> Writer:
    reports_usage = body.stream_options is not None and body.stream_options.include_usage
    return ResponseWriter(formatter, options, body.model, reports_usage=reports_usage)


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
    return StructuredOutput.json(schema)


def _num_top(body: ChatBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def conversation_of(body: Conversing, messages: Sequence[ChatMessage], tools: Sequence[ToolBody]) -> Conversation:
    """Returns what a chat template renders for a request."""
    return Conversation(
        turns=tuple(map(_turn, messages)),
        tools=tuple(map(_tool, tools)),
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
