"""The form that a generated text has to have, as a user says it. `requests.automaton` is what is made of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from draftwire.errors import InvalidRequestError

MAX_FORM_BYTES = 65_536
"""All texts of a form together."""
MAX_CHOICES = 1_024


class Form(Enum):
    """How the form is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form. Whether it makes sense is found out when it is compiled.

    Raises:
        InvalidRequestError: it is empty or too large.
    """

    form: Form
    texts: tuple[str, ...]
    """The schema, the expression or the grammar; of `Form.CHOICES` all of them."""

    @classmethod
    def json(cls, schema: str | Mapping[str, Any]) -> "StructuredOutput":
        """Asks for JSON that is valid against a schema, which is written in JSON or will be."""
        return cls(Form.JSON_SCHEMA, (schema if isinstance(schema, str) else json.dumps(schema),))

    @classmethod
    def regex(cls, expression: str) -> "StructuredOutput":
        """Asks for a text that matches a regular expression, all of it."""
        return cls(Form.REGEX, (expression,))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "StructuredOutput":
        """Asks for one of these texts."""
        return cls(Form.CHOICES, tuple(texts))

    @classmethod
    def grammar(cls, grammar: str) -> "StructuredOutput":
        """Asks for a sentence of a context-free grammar, written as for Lark; its first rule is "start"."""
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
        except UnicodeEncodeError:  # whose message would quote the text
            raise InvalidRequestError(f"structured_output: {name} holds characters that UTF-8 cannot encode") from None
        if num_bytes > MAX_FORM_BYTES:
            raise InvalidRequestError(f"structured_output: {name} takes at most {MAX_FORM_BYTES} bytes")
