"""Detection of unknown protobuf fields, sent by newer clients. Requests with such fields are refused."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from draftwire.errors import InvalidRequestError

MAX_MESSAGES = 65_536
"""Most messages within one request: checking them takes time on the event loop."""


def refuse_unknown_fields(request: Message) -> None:
    """Checks a request and all messages in it. Map entries are skipped: their unknown fields are not available.

    Raises:
        InvalidRequestError: a message has an unknown field, or there are too many messages.
    """
    waiting = [request]
    num_messages = 1
    while waiting:
        message = waiting.pop()
        unknown = UnknownFieldSet(message)
        if len(unknown):
            raise InvalidRequestError(
                f"field {unknown[0].field_number} of {message.DESCRIPTOR.name} is unknown: the server may be older "
                "than the client"
            )
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            inner = value if field.is_repeated else [value]
            num_messages += len(inner)
            if num_messages > MAX_MESSAGES:
                raise InvalidRequestError(f"a request holds at most {MAX_MESSAGES} messages")
            waiting.extend(inner)
