"""Structured output: the form that a request prescribes for its text; an option of that name compiles it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from draftwire.errors import InvalidRequestError
from draftwire.requests.tool_calls import MAX_TOOL_CALLS_AT_ONCE, SYNTAXES, CallableTool, ToolCallForm

MAX_FORM_BYTES = 65_536
"""Upper bound of the bytes of a form, all its texts together."""
MAX_CHOICES = 1_024
MAX_PLACE_S = 0.25
"""Limit on the CPU time of one mask, seconds. Usual ones take 20 µs; a form that exceeds the limit fails its session,
because all sessions of a batch wait for it. A gateway waits for as long before it drops a block of such a session."""
MASKS_PER_TOKEN_S = 0.001
"""CPU time that the masks of a session may take for each token, seconds: above it, nothing is drafted for the session,
and its caller pays for the rest."""


class Form(Enum):
    """Notation of a form."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form of a text. Only compiling it shows whether it is well-formed.

    Raises:
        InvalidRequestError: the form is empty or too large.
    """

    form: Form
    texts: tuple[str, ...]
    """The schema, the expression, the grammar or the JSON of a `ToolCallForm`; for `Form.CHOICES` all choices."""

    @classmethod
    def json(cls, schema: str | Mapping[str, Any]) -> "StructuredOutput":
        """Returns the form of JSON that is valid against a schema, given as JSON text or as an object."""
        return cls(Form.JSON_SCHEMA, (schema if isinstance(schema, str) else json.dumps(schema),))

    @classmethod
    def regex(cls, expression: str) -> "StructuredOutput":
        """Returns the form of texts that match a regular expression as a whole."""
        return cls(Form.REGEX, (expression,))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "StructuredOutput":
        """Returns the form that allows exactly these texts."""
        return cls(Form.CHOICES, tuple(texts))

    @classmethod
    def grammar(cls, grammar: str) -> "StructuredOutput":
        """Returns the form of sentences of a context-free grammar in Lark syntax; its first rule is "start"."""
        return cls(Form.GRAMMAR, (grammar,))

    @classmethod
    def tool_calls(
        cls, syntax: str, tools: Mapping[str, str], *, at_least: int = 1, at_most: int = MAX_TOOL_CALLS_AT_ONCE
    ) -> "StructuredOutput":
        """Returns the form of texts in which every tool call is valid.

        Args:
            syntax: how calls are written: "hermes", "llama3_json", "mistral", or "json" for a list of calls.
            tools: the JSON schema of the arguments by the name of the function.
            at_least: fewest calls, 0 or 1. With 1 the text has nothing else than calls.
            at_most: most calls.
        """
        known = SYNTAXES.get(syntax)
        if known is None:
            names = ", ".join(SYNTAXES)
            raise InvalidRequestError(f"structured_output: tool_calls: the syntax is one of {names}, not {syntax!r}")
        callable_tools = tuple(CallableTool(name, parameters) for name, parameters in tools.items())
        return cls(Form.TOOL_CALLS, (ToolCallForm(known, callable_tools, at_least, at_most).to_json(),))

    def __post_init__(self) -> None:
        name = self.form.value
        if not self.texts or not all(self.texts):
            raise InvalidRequestError(f"structured_output: {name} must not be empty")
        if self.form is Form.CHOICES and len(self.texts) > MAX_CHOICES:
            raise InvalidRequestError(f"structured_output: {name} takes at most {MAX_CHOICES} texts")
        if len(set(self.texts)) < len(self.texts):
            raise InvalidRequestError(f"structured_output: {name} holds a text twice")
        try:
            num_bytes = sum(len(text.encode()) for text in self.texts)
        except UnicodeEncodeError:  # its message would quote the text
            raise InvalidRequestError(f"structured_output: {name} holds characters that UTF-8 cannot encode") from None
        if num_bytes > MAX_FORM_BYTES:
            raise InvalidRequestError(f"structured_output: {name} takes at most {MAX_FORM_BYTES} bytes")


def structured(form: object) -> StructuredOutput:
    """Returns the form of sampling parameters as what it is.

    Raises:
        InvalidRequestError: it is something else.
    """
    if not isinstance(form, StructuredOutput):
        raise InvalidRequestError("structured_output: not a StructuredOutput, such as StructuredOutput.json(schema)")
    return form
