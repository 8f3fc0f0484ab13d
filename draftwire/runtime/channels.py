"""What gRPC is told about every connection: message sizes, keep-alive, flow control. One place for clients and servers.

gRPC ignores a misspelt argument silently; the tests look every name up in the compiled library.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import Message as ProtoMessage

from draftwire.errors import InvalidRequestError
from draftwire.models.description import ModelDescription
from draftwire.runtime.settings import LEAST_KEEPALIVE_S, LEAST_MESSAGE_BYTES, ConnectionSettings

ChannelArguments = list[tuple[str, int]]

CONTROL_MESSAGE_BYTES = 4 * 2**20
"""Largest message on a connection that carries commands and events alone. Senders stay below `LEAST_MESSAGE_BYTES`."""

ENVELOPE_BYTES = 2**16
"""Room for what a message holds besides the bulk that it was sent for: fences, parameters, token ids of a block."""

FRAME_BYTES = 14
"""What gRPC and HTTP/2 put before a message that fits into one frame."""

BYTES_PER_ID = 5
"""Most bytes that a token id takes in a message."""

MIN_PING_INTERVAL_MS = int(LEAST_KEEPALIVE_S * 1e3) // 2
"""A server sends a client away that pings twice within this time, again and again: well below what any client of ours
can be configured to do, so that no two configurations fall out, and still a limit for foreign clients."""

Item = TypeVar("Item")
Message = TypeVar("Message", bound=ProtoMessage)


def client_options(settings: ConnectionSettings, *, bulk: bool) -> ChannelArguments:
    """Returns the arguments of a channel."""
    largest = settings.max_message_bytes
    return [
        *_options_of_both(settings, largest if bulk else min(largest, CONTROL_MESSAGE_BYTES)),
        # Services reach each other directly, whatever proxy the environment has for the outside.
        ("grpc.enable_http_proxy", 0),
        # Equal channels share one connection otherwise.
        ("grpc.use_local_subchannel_pool", int(bulk)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # In spite of its name, the time that one attempt to connect may take (20 s by default).
        ("grpc.min_reconnect_backoff_ms", _milliseconds(settings.keepalive_timeout_s)),
        # A service that moved is looked up as often as it is tried (every 30 s by default).
        ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ]


def server_options(settings: ConnectionSettings) -> ChannelArguments:
    """Returns the arguments of a server."""
    return [
        *_options_of_both(settings, settings.max_message_bytes),
        # This is the name behind GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS: without "recv".
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 2),
        # Otherwise a second server on the same port would silently take half of the calls.
        ("grpc.so_reuseport", 0),
    ]


def _options_of_both(settings: ConnectionSettings, message_bytes: int) -> ChannelArguments:
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        # Both ends ask, also while no call is running: a gateway whose drafter has vanished goes on without it, and a
        # verifier whose gateway has vanished frees its sessions.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.keepalive_timeout_s)),
        # The one that counts: gRPC 1.85 never starts the other's timer, and waits a minute for answers without this.
        ("grpc.http2.ping_timeout_ms", _milliseconds(settings.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Probing would replace the window by one of its own choice, at least 4 MiB, and adds pings to the messages.
        ("grpc.http2.lookahead_bytes", settings.flow_control_window_bytes),
        ("grpc.http2.bdp_probe", 0),
        # Draft distributions do not compress, and trying takes longer than sending.
        ("grpc.default_compression_algorithm", int(grpc.Compression.NoCompression)),
    ]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1e3)


def check_prompt_fits(model: ModelDescription, max_message_bytes: int) -> None:
    """Makes sure that a session whose prompt fills the context can be opened.

    Raises:
        InvalidRequestError: the largest message is too small for it.
    """
    num_ids = model.context_length + 2 * model.vocab_size  # every token allowed, and every one a stop token
    require_room(
        f"a prompt of {model.context_length} tokens, the context of {model.name}",
        num_ids * BYTES_PER_ID,
        max_message_bytes,
    )


def require_room(what: str, most_bytes: int, max_message_bytes: int) -> None:
    """Makes sure that something fits into one message.

    Raises:
        InvalidRequestError: it does not; says what and what to set.
    """
    needed = most_bytes + ENVELOPE_BYTES
    if needed > max_message_bytes:
        raise InvalidRequestError(
            f"max_message_bytes is {max_message_bytes}, but {what}, can take {needed}: set it at least so high at all"
            " services, or serve something smaller"
        )


def in_messages(make: Callable[[Sequence[Item]], Message], items: Sequence[Item]) -> Iterator[Message]:
    """Yields messages that hold the items in order, one message unless it would be too large for a control stream.

    Args:
        make: returns the message that holds some of the items.
        items: at least one.
    """
    message = make(items)
    if len(items) == 1 or message.ByteSize() <= LEAST_MESSAGE_BYTES:
        yield message
        return
    middle = len(items) // 2
    yield from in_messages(make, items[:middle])
    yield from in_messages(make, items[middle:])
