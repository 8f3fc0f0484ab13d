"""Encoding of structured output forms."""

from draftwire.errors import InvalidRequestError
from draftwire.requests.structured_output import Form, StructuredOutput
from draftwire.v1 import session_pb2


def form_to_proto(wanted: object) -> session_pb2.StructuredOutput | None:
    """Encodes a form; None stays None.

    Raises:
        InvalidRequestError: `wanted` is neither None nor a `StructuredOutput`.
    """
    if wanted is None:
        return None
    if not isinstance(wanted, StructuredOutput):
        raise InvalidRequestError("structured_output: not a StructuredOutput, such as StructuredOutput.json(schema)")
    if wanted.form is Form.CHOICES:
        return session_pb2.StructuredOutput(choices=session_pb2.StructuredOutputChoices(texts=wanted.texts))
    message = session_pb2.StructuredOutput()
    setattr(message, wanted.form.value, wanted.texts[0])
    return message
