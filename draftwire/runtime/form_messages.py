"""Encoding of structured output forms."""

from draftwire.requests.structured_output import Form, structured
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
