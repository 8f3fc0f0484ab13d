"""How model families write tool calls, and the form of texts in which every call fits its tool.

Of the library's extended grammars, which users cannot send: see `draftwire.options.structured_output`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from draftwire.errors import InvalidRequestError

MAX_TOOL_CALLS_AT_ONCE = 16
"""Most calls of one answer that a form allows: a model that cannot stop would call for as long as it may write."""
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ANY_ARGUMENTS = '{"type": "object"}'
NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How models of a family write calls: `{"name": ..., "arguments": ...}`, between markers."""

    name: str
    opening: str = ""
    """Text before a call or, with `is_list`, before all of them; empty: calls are the whole answer."""
    closing: str = ""
    """Text after each call."""
    separator: str = ", "
    """Text between calls."""
    is_list: bool = False
    """Whether the calls are entries of a JSON list."""
    arguments: str = "arguments"
    """Key of a call's arguments."""
    prefix: str = ""
    """Text that may stand before the calls where these are the whole answer."""


HERMES = ToolSyntax("hermes", "<tool_call>", "</tool_call>", "\n")
"""`<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`: Hermes, Qwen 2.5, Qwen 3 and many others."""
LLAMA3_JSON = ToolSyntax("llama3_json", separator="; ", arguments="parameters", prefix="<|python_tag|>")
"""`{"name": ..., "parameters": ...}`, several joined by semicolons: Llama 3.1 and later."""
MISTRAL = ToolSyntax("mistral", "[TOOL_CALLS]", is_list=True)
"""`[TOOL_CALLS][{"name": ..., "arguments": ...}]`, and later `[TOOL_CALLS]name[ARGS]{...}`: Mistral."""
PLAIN_LIST = ToolSyntax("json", is_list=True)
"""`[{"name": ..., "arguments": ...}]`: where nothing is known of a model, for answers that have to be calls."""

SYNTAXES = {syntax.name: syntax for syntax in (HERMES, LLAMA3_JSON, MISTRAL, PLAIN_LIST)}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A function and the schema of its arguments."""

    name: str
    parameters: str = NO_ARGUMENTS
    """JSON schema of an object."""


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """The calls that `StructuredOutput.tool_calls` prescribes.

    Raises:
        InvalidRequestError: there is no tool, one has another name than functions can have, one name is there twice,
            the syntax is unknown, or the numbers are out of range.
    """

    syntax: ToolSyntax
    tools: tuple[CallableTool, ...]
    at_least: int
    """Fewest calls; with 0 any text without calls is allowed too, and text around calls where the syntax has markers.
    Without markers such a text begins with neither `{` nor `<|`."""
    at_most: int

    def __post_init__(self) -> None:
        if not self.tools:
            raise _fault("there is no tool to call")
        names = [tool.name for tool in self.tools]
        if not all(map(FUNCTION_NAME.fullmatch, names)):
            raise _fault("the name of a function has 1 to 64 letters, digits, _, - and .")
        if len(set(names)) < len(names):
            raise _fault("two functions have the same name")
        if not 0 <= self.at_least <= 1 <= self.at_most <= MAX_TOOL_CALLS_AT_ONCE:
            raise _fault(f"at_least has to be 0 or 1, and at_most 1 to {MAX_TOOL_CALLS_AT_ONCE}")
        if self.at_least == 0 and self.syntax is PLAIN_LIST:
            raise _fault(f"the syntax {PLAIN_LIST.name} has no text beside calls")

    def to_json(self) -> str:
        """Returns the form as JSON text."""
        return json.dumps({**asdict(self), "syntax": self.syntax.name})

    @classmethod
    def from_json(cls, text: str) -> "ToolCallForm":
        """Returns the form that `to_json` wrote.

        Raises:
            InvalidRequestError: the text is something else.
        """
        try:
            fields = json.loads(text)
            syntax = SYNTAXES[fields.pop("syntax")]
            tools = tuple(CallableTool(**tool) for tool in fields.pop("tools"))
            form = cls(syntax, tools, **fields)
            are_texts = all(isinstance(tool.name, str) and isinstance(tool.parameters, str) for tool in tools)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise _fault("neither a syntax with tools nor made by StructuredOutput.tool_calls") from error
        if not are_texts:
            raise _fault("names and parameters have to be texts")
        return form


def syntax_of_template(template: str) -> ToolSyntax | None:
    """Returns how a chat template writes the calls of earlier answers; None if it is none of the known ways."""
    writes_json = "name" in template and "arguments" in template
    has_tags = HERMES.opening in template and "<function=" not in template and "<arg_key>" not in template
    if has_tags and writes_json:
        return HERMES
    if MISTRAL.opening in template:
        return MISTRAL
    is_llama = "<|start_header_id|>" in template or LLAMA3_JSON.prefix in template
    return LLAMA3_JSON if is_llama and '"parameters"' in template else None


def grammar_of(
    form: ToolCallForm, schema_of: Callable[[str], dict[str, Any]], token_of: Callable[[str], int | None]
) -> str:
    """Returns the library's grammar of a form.

    `token_of` returns the added token whose text is a marker; None if markers are spelt like other text.
    """
    syntax, most = form.syntax, form.at_most

    def marker(text: str) -> str:
        token = token_of(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    rules = [f"call: {' | '.join(f'call{index}' for index in range(len(form.tools)))}"]
    for index, tool in enumerate(form.tools):
        head = json.dumps(f'{{"name": "{tool.name}", "{syntax.arguments}": ')
        rules += [f'call{index}: {head} arguments{index} "}}"', f"arguments{index}: %json {_schema(tool, schema_of)}"]
    if syntax.is_list:
        rules.append(f'body: "[" {_joined("call", syntax.separator, most)} "]"')
    elif syntax.opening:
        rules.append(f'body: "\\n" call "\\n" {marker(syntax.closing)}')
    else:
        rules.append(f"body: {_joined('call', syntax.separator, most)}")
    num_openings = most if syntax.opening and not syntax.is_list else 1
    if form.at_least:
        rules.append(f"one: {marker(syntax.opening)} body" if syntax.opening else "one: body")
        start = [f"start: {_joined('one', syntax.separator, num_openings)}"]
    elif not syntax.opening:
        prefix = "" if token_of(syntax.prefix) is None else f"{marker(syntax.prefix)}? "
        start = [f"start: FREE | {prefix}body", r"FREE: /\s*([^\s{<](?s:.*)|<([^|](?s:.*))?)?/"]
    else:
        escaped = re.escape(syntax.opening)
        free = rf"FREE: /(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/"
        if token_of(syntax.opening) is None:
            # One piece with the text before it: where that text ends, only its marker says.
            start = [f"start: (opened body){{0,{num_openings}}} FREE", rf"opened[lazy]: /(?s:.*){escaped}/", free]
        else:
            start = [f"start: FREE ({marker(syntax.opening)} body FREE){{0,{num_openings}}}", free]
    return "\n".join([*start, *rules, ""])


def _joined(rule: str, separator: str, most: int) -> str:
    """Returns a rule once or more, with a separator between."""
    return f"{rule} ({json.dumps(separator)} {rule}){{0,{most - 1}}}" if most > 1 else rule


def _schema(tool: CallableTool, schema_of: Callable[[str], dict[str, Any]]) -> str:
    """Returns the schema of a tool's arguments, which are an object."""
    schema = {"type": "object", **schema_of(tool.parameters or NO_ARGUMENTS)}
    if schema["type"] != "object":
        raise _fault("parameters of a function are those of an object")
    return json.dumps(schema)


def _fault(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_output: tool_calls: {message}")
