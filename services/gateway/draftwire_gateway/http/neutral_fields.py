"""Fields of OpenAI's API and of other servers that ask for what happens anyway, that promise nothing about the text, or
that ask for the same under another name.

Clients send many of them whether their users think of them or not. What asks for something else is left where it is,
and refused by its name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from draftwire_gateway.http.json_parsing import parse

Given = dict[str, Any]


def _is(*values: object) -> Callable[[Any], bool]:
    """Returns a predicate: whether a value is one of these, with the same type. True is not 1."""
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    # Who asks, and for what records: nothing is stored.
    "metadata": lambda given: isinstance(given, dict),
    "prompt_cache_key": _is_text,
    "request_id": _is_text,
    "safety_identifier": _is_text,
    "store": lambda given: isinstance(given, bool),
    # What promises nothing about the text. Templates are told with chat_template_kwargs.
    "reasoning_effort": _is_text,
    "verbosity": _is_text,
    "reasoning": lambda given: isinstance(given, dict),
    # Of /v1/responses.
    "background": _is(False),
    "include": lambda given: isinstance(given, list) and set(map(str, given)) <= {"reasoning.encrypted_content"},
    "truncation": _is("disabled"),
    # How it is served: all requests alike, tokens are drawn, text is text.
    "best_of": _is(1),
    "detokenize": _is(True),
    "early_stopping": _is(False),
    "include_stop_str_in_output": _is(False),
    "length_penalty": _is(1, 1.0),
    "modalities": _is(["text"]),
    "priority": _is(0),
    "service_tier": _is("auto", "default"),
    "skip_special_tokens": _is(True),
    "spaces_between_special_tokens": _is(True),
    "use_beam_search": _is(False),
}
"""Checks by name of whether a value means what happens anyway."""

FORMS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Names that others have for parts of `structured_output`."""
OWN_FORM, OTHER_FORM = "structured_output", "structured_outputs"
NO_TOP_K = -1
"""Value of others for `top_k` 0."""


def without_neutral(given: Given, known: frozenset[str]) -> Given:
    """Returns a request without fields that ask for what happens anyway, and with own names for those of others. Fields
    that the route knows are left as they are.

    Raises:
        RefusedError: a schema that is written as JSON in a text is none, or exceeds a limit.
    """
    kept = {
        name: value
        for name, value in given.items()
        if value is not None and (name in known or name not in NEUTRAL or not NEUTRAL[name](value))
    }
    if type(kept.get("top_k")) is int and kept["top_k"] == NO_TOP_K:
        del kept["top_k"]
    forms = [name for name in (*FORMS, OTHER_FORM) if name in kept]
    if len(forms) == 1 and OWN_FORM not in kept:
        value, form = kept.pop(forms[0]), FORMS.get(forms[0])
        kept[OWN_FORM] = value if form is None else {form: _as_schema(value) if form == "json" else value}
    return kept


def _as_schema(value: Any) -> Any:
    """Returns an object that is written as JSON, parsed with the limits of a body; anything else as it is, to be
    refused for what it is.
    """
    return parse(value.encode(errors="replace")) if isinstance(value, str) else value
