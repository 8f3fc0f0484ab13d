"""Structured output: the form that a request prescribes for its text. `requests.automaton` compiles it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from draftwire.errors import InvalidRequestError

MAX_FORM_BYTES = 65_536
"""Upper bound of the bytes of a form, all its texts together."""
MAX_CHOICES = 1_024


class Form(Enum):
    """Notation of a form."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form of a text. Only compiling it shows whether it is well-formed.

    Raises:
        InvalidRequestError: the form is empty or too large.
    """

    form: Form
    texts: tuple[str, ...]
    """The schema, the expression or the grammar; for `Form.CHOICES` all choices."""

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
