"""Body of POST /v1/responses, which is a conversation of /v1/chat/completions in other words."""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from draftwire_gateway.http import body as bodies
from draftwire_gateway.text.conversation import MAX_CHAT_MESSAGES, MAX_TOOL_CHARACTERS, MAX_TOOLS

SYSTEM_ROLES = {"developer": "system"}
"""Roles that have another name in chat templates."""


def _nothing(_given: Any) -> tuple[()]:
    return ()


Unused = Annotated[tuple[()], BeforeValidator(_nothing, list[Any])]
"""A list that clients send back, and that has no effect here."""


class ContentPart(bodies.Strict):
    """A part of a message, which is always text."""

    model_config = bodies.SENT_BACK
    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(bodies.as_text_type, str)]
    text: str
    annotations: Unused = ()
    """Annotations of an earlier answer; no effect here."""
    logprobs: Unused = ()
    """Log-probabilities of an earlier answer; no effect here."""


Content = Annotated[list[ContentPart], bodies.FirstFault(), BeforeValidator(bodies.as_parts, str | list[ContentPart])]


class MessageItem(bodies.Strict):
    """A message."""

    model_config = bodies.SENT_BACK
    type: Literal["message"] = "message"
    role: str
    content: Content
    id: str = ""
    status: str = ""
    phase: str = ""


class CallItem(bodies.Strict):
    """A tool call of an earlier answer."""

    model_config = bodies.SENT_BACK
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str = ""
    status: str = ""


class CallOutputItem(bodies.Strict):
    """Output of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str = ""
    status: str = ""


class ReasoningItem(bodies.Strict):
    """How an earlier answer was found; has no effect here, as templates leave it out."""

    model_config = bodies.SENT_BACK
    type: Literal["reasoning"]
    id: str = ""
    summary: Unused = ()
    content: Unused = ()
    encrypted_content: str = ""
    status: str = ""


Item = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]


def _as_items(given: Any) -> Any:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list):  # the type of a message may be left out
        return [{"type": "message", **one} if isinstance(one, dict) and "role" in one else one for one in given]
    return given


class FunctionTool(bodies.Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str = ""
    parameters: Annotated[str, BeforeValidator(bodies.as_object, dict[str, Any])] = ""
    strict: bool = False
    """Whether the arguments of every call follow the schema, also where the model is free to call or not."""


Tools = Annotated[list[FunctionTool], bodies.FirstFault(), bodies.at_most(MAX_TOOLS)]


class NamedFunctionTool(bodies.Strict):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(bodies.Strict):
    """Form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    """Has no effect here."""
    description: str = ""
    """Has no effect here."""
    json_schema: Annotated[str, BeforeValidator(bodies.as_object, dict[str, Any])] = Field("", alias="schema")
    strict: bool = True
    """Has no effect here: texts always follow the schema."""

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != bool(self.json_schema):
            raise bodies.value_error("schema comes with the type json_schema, and with no other")
        return self


class OutputTextOptions(bodies.Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: str = ""
    """Has no effect here."""


class ResponsesBody(bodies.GenerateBody):
    """Body of POST /v1/responses."""

    input: Annotated[
        list[Item], bodies.FirstFault(), bodies.at_most(MAX_CHAT_MESSAGES), BeforeValidator(_as_items, str | list[Item])
    ]
    n: Literal[1] = 1
    instructions: str = ""
    max_output_tokens: int | None = None
    text: OutputTextOptions = OutputTextOptions()
    tools: Tools = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | NamedFunctionTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[str, BeforeValidator(bodies.as_object, dict[str, Any])] = "{}"

    @model_validator(mode="after")
    def _check_conversation(self) -> "ResponsesBody":
        for name in ("token_details", "return_token_ids", "prompt_logprobs", "generated_choices"):
            if getattr(self, name):
                raise bodies.value_error(f"{name}: means nothing on this route")
        if sum(len(tool.parameters) for tool in self.tools) > MAX_TOOL_CHARACTERS:
            raise bodies.value_error(f"tools: takes at most {MAX_TOOL_CHARACTERS} characters")
        if not self.chat.messages:
            raise bodies.value_error("input: has no message")
        self.chat.check_combinations()
        return self

    @cached_property
    def chat(self) -> bodies.ChatBody:
        """The same request of /v1/chat/completions."""
        common = {name: getattr(self, name) for name in bodies.GenerateBody.model_fields}
        choice = self.tool_choice
        return bodies.ChatBody.model_construct(
            **common,
            messages=_messages(self),
            max_tokens=self.max_output_tokens,
            tools=list(map(_tool, self.tools)),
            tool_choice=choice
            if isinstance(choice, str)
            else bodies.NamedTool(type="function", function=bodies.NamedFunction(name=choice.name)),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text.format),
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _messages(body: ResponsesBody) -> list[bodies.ChatMessage]:
    """Returns the conversation. Calls that follow each other, or an answer, are of one message."""
    messages: list[bodies.ChatMessage] = []
    if body.instructions:
        messages.append(_message("system", body.instructions))
    for item in body.input:
        match item:
            case MessageItem():
                messages.append(_message(SYSTEM_ROLES.get(item.role, item.role), _text(item.content)))
            case CallOutputItem():
                messages.append(_message("tool", _text(item.output), tool_call_id=item.call_id))
            case CallItem():
                function = bodies.CalledFunction(name=item.name, arguments=item.arguments)
                calls = [bodies.MessageToolCall(id=item.call_id, function=function)]
                last = messages[-1] if messages and messages[-1].role == "assistant" else None
                if last is None:
                    messages.append(_message("assistant", "", tool_calls=calls))
                else:
                    messages[-1] = last.model_copy(update={"tool_calls": [*last.tool_calls, *calls]})
            case ReasoningItem():
                pass
    return messages


def _message(role: str, text: str, **more: Any) -> bodies.ChatMessage:
    return bodies.ChatMessage(role=role, content=[bodies.TextPart(type="text", text=text)], **more)


def _text(content: list[ContentPart]) -> str:
    return "".join(part.text for part in content)


def _tool(tool: FunctionTool) -> bodies.ToolBody:
    function = bodies.Function.model_construct(**tool.model_dump(exclude={"type"}))
    return bodies.ToolBody.model_construct(type="function", function=function)


def _format(wanted: TextFormat | None) -> bodies.ResponseFormat | None:
    if wanted is None:
        return None
    schema = bodies.JsonSchema.model_construct(json_schema=wanted.json_schema) if wanted.type == "json_schema" else None
    return bodies.ResponseFormat.model_construct(type=wanted.type, json_schema=schema)
