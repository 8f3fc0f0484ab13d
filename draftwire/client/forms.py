"""Forms of texts on the wire."""

from draftwire.structured_output import Form, StructuredOutput
from draftwire.v1 import session_pb2


def form_to_proto(wanted: StructuredOutput | None) -> session_pb2.StructuredOutput | None:
    """Encodes a form; None is none."""
    if wanted is None:
        return None
    if wanted.form is Form.CHOICES:
        return session_pb2.StructuredOutput(choices=session_pb2.StructuredOutputChoices(texts=wanted.texts))
    message = session_pb2.StructuredOutput()
    setattr(message, wanted.form.value, wanted.texts[0])
    return message
