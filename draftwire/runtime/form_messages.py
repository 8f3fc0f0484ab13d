"""Encoding and decoding of structured output forms."""

from draftwire.errors import InvalidRequestError
from draftwire.requests.structured_output import MAX_CHOICES, Form, StructuredOutput, structured
from draftwire.v1 import session_pb2


def form_to_proto(wanted: object) -> session_pb2.StructuredOutput | None:
    """Encodes a form; None stays None.

    Raises:
        InvalidRequestError: `wanted` is neither None nor a `StructuredOutput`.
    """
    if wanted is None:
        return None
    form = structured(wanted)
    if form.form is Form.CHOICES:
        return session_pb2.StructuredOutput(choices=session_pb2.StructuredOutputChoices(texts=form.texts))
    message = session_pb2.StructuredOutput()
    setattr(message, form.form.value, form.texts[0])
    return message


def form_from_proto(message: session_pb2.StructuredOutput) -> StructuredOutput:
    """Decodes a form.

    Raises:
        InvalidRequestError: there is none, or it is empty or too large.
    """
    name = message.WhichOneof("form")
    if name is None:
        raise InvalidRequestError("structured_output has no form")
    value = getattr(message, name)
    if name != Form.CHOICES.value:
        return StructuredOutput(Form(name), (value,))
    if len(value.texts) > MAX_CHOICES:  # checked before anything is allocated
        raise InvalidRequestError(f"structured_output: choices takes at most {MAX_CHOICES} texts")
    return StructuredOutput(Form.CHOICES, tuple(value.texts))
