"""Tool calls of a chat answer: what a request prescribes, and how they are read."""

import secrets
import string
from dataclasses import dataclass

from draftwire.errors import InvalidRequestError
from draftwire.requests.structured_output import MAX_FORM_BYTES, StructuredOutput
from draftwire.requests.tool_calls import (
    ANY_ARGUMENTS,
    FUNCTION_NAME,
    MAX_TOOL_CALLS_AT_ONCE,
    MISTRAL,
    PLAIN_LIST,
    ToolSyntax,
)
from draftwire_gateway.http.body import ChatBody, NamedTool, ToolBody
from draftwire_gateway.http.declared_properties import closed
from draftwire_gateway.text.tool_call_reader import MARKS_IN_CALLS, ToolCallReader

_ID_SIGNS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Signs of a call's id; templates of Mistral refuse others."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How tools are used in the answers to one request."""

    syntax: ToolSyntax
    names: frozenset[str]
    form: StructuredOutput | None
    """Structured output that makes calls certain to be valid; None where the model is free in what it writes."""
    must_call: bool
    """Whether the answer has nothing but calls."""
    is_named: bool
    """Whether the request says which function is called."""

    @property
    def shown_tokens(self) -> frozenset[str]:
        """Special tokens that are to be read, if the tokenizer has them."""
        syntax = self.syntax
        inner = MARKS_IN_CALLS if syntax is MISTRAL else ()
        return frozenset({syntax.opening, syntax.closing, syntax.prefix, *inner} - {""})

    def reader(self) -> ToolCallReader:
        """Returns a reader of one answer."""
        return ToolCallReader(
            self.syntax, self.names, new_call_id, is_certain=self.form is not None, must_call=self.must_call
        )

    def finish_reason(self, reason: str, reader: ToolCallReader) -> str:
        """Returns the reason as OpenAI's API has it: calls end an answer, unless they were asked for by name, or a stop
        string has cut the last one.
        """
        is_ended_by_calls = reason == "stop" and reader.num_calls and not reader.is_within_call
        return "tool_calls" if is_ended_by_calls and not self.is_named else reason


def tool_use(body: ChatBody, syntax: ToolSyntax | None) -> ToolUse | None:
    """Returns how a request uses tools; None if the answer is text. `syntax` is None if it is not known how the target
    writes calls.

    Raises:
        InvalidRequestError: the request asks for what cannot be had.
    """
    tools = body.offered_tools
    if not tools or body.has_form:
        return None
    is_constrained = body.must_call or any(tool.function.strict for tool in tools) or not body.parallel_tool_calls
    if syntax is None:
        if not is_constrained:
            return None
        if not body.must_call:
            raise InvalidRequestError(
                "tools: how this model writes calls is not known (tool_call_syntax of the gateway), so neither strict "
                'nor parallel_tool_calls means anything unless tool_choice is "required" or names a function'
            )
        syntax = PLAIN_LIST
    form = _form(body, syntax) if is_constrained else None
    names = frozenset(tool.function.name for tool in tools)
    return ToolUse(syntax, names, form, body.must_call, isinstance(body.tool_choice, NamedTool))


def _closed(tool: ToolBody) -> str:
    return closed(tool.function.parameters) if tool.function.parameters else ""


def _form(body: ChatBody, syntax: ToolSyntax) -> StructuredOutput:
    tools = body.tools
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise InvalidRequestError("tool_choice: names a function that is not among the tools")
    names = [tool.function.name for tool in tools]
    if not all(map(FUNCTION_NAME.fullmatch, names)):
        raise InvalidRequestError("tools: the name of a function has 1 to 64 letters, digits, _, - and .")
    if len(set(names)) < len(names):
        raise InvalidRequestError("tools: two functions have the same name")
    if sum(len(tool.function.parameters) for tool in tools) > MAX_FORM_BYTES:  # before they are written anew
        raise InvalidRequestError(
            f"tools: the schemas that arguments have to follow take at most {MAX_FORM_BYTES} bytes"
        )
    is_single = isinstance(body.tool_choice, NamedTool) or not body.parallel_tool_calls
    return StructuredOutput.tool_calls(
        syntax.name,
        {
            tool.function.name: _closed(tool) if body.must_call or tool.function.strict else ANY_ARGUMENTS
            for tool in tools
        },
        at_least=int(body.must_call),
        at_most=1 if is_single else MAX_TOOL_CALLS_AT_ONCE,
    )


def new_call_id() -> str:
    """Draws the id of a call."""
    return "".join(secrets.choice(_ID_SIGNS) for _ in range(ID_LENGTH))
