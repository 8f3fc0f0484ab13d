"""gRPC channel arguments of clients and servers, message sizes, keep-alive, flow control; and the port of a server.

gRPC silently ignores a misspelt argument; the tests look up every name in the compiled library.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import Message as ProtoMessage

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.models.description import ModelDescription
from draftwire.runtime.addresses import host_and_port, is_of_this_machine, is_taken
from draftwire.runtime.call_limits import CallLimits
from draftwire.runtime.settings import LEAST_KEEPALIVE_S, LEAST_MESSAGE_BYTES, ConnectionSettings

ChannelArguments = list[tuple[str, int]]

CONTROL_MESSAGE_BYTES = 4 * 2**20
"""Largest message on a connection for commands and events only. Senders stay below `LEAST_MESSAGE_BYTES`."""

ENVELOPE_BYTES = 2**16
"""Allowance for the small fields of a bulk message: fences, parameters, token ids of a block."""

FRAME_BYTES = 14
"""Overhead of a message that fits into one HTTP/2 frame: gRPC prefix and frame header."""

BYTES_PER_ID = 5
"""Most bytes of a token id in a message, as a varint."""

MIN_PING_INTERVAL_MS = int(LEAST_KEEPALIVE_S * 1e3) // 2
"""A server disconnects a client that repeatedly pings twice within this time. Well below the shortest keep-alive of our
clients, so that any two configurations work together, and still a limit for foreign clients."""

PUBLIC_WINDOW_BYTES = 2**16
"""Bytes that a call of a user may send ahead of what is read. A longer request takes a round trip more."""

MAX_CONNECTIONS = 4096
"""Connections that a server accepts; further ones are closed at once."""

HANDSHAKE_MS = 10_000
"""How long a new connection may take until it speaks HTTP/2."""

IDLE_MS = 300_000
"""How long a connection of a user may be open without a call. Clients open another one by themselves."""

IDENTITY_ONLY = 1
"""Set of compression algorithms: none. The limit of message sizes would be that of the compressed message, which can
become a thousand times larger."""

Item = TypeVar("Item")
Message = TypeVar("Message", bound=ProtoMessage)


def client_options(settings: ConnectionSettings, *, bulk: bool) -> ChannelArguments:
    """Returns the arguments of a channel. `bulk` allows large messages and uses a TCP connection of its own."""
    largest = settings.max_message_bytes
    return [
        *_options_of_both(settings, largest if bulk else min(largest, CONTROL_MESSAGE_BYTES)),
        ("grpc.http2.lookahead_bytes", settings.flow_control_window_bytes),
        # Services connect directly, whatever proxy the environment sets.
        ("grpc.enable_http_proxy", 0),
        # Without this, equal channels share one connection.
        ("grpc.use_local_subchannel_pool", int(bulk)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Despite its name, the timeout of one connection attempt (20 s by default).
        ("grpc.min_reconnect_backoff_ms", _milliseconds(settings.keepalive_timeout_s)),
        # DNS is queried as often as a connection is tried (every 30 s by default), for services that moved.
        ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ]


def server_options(settings: ConnectionSettings, limits: CallLimits) -> ChannelArguments:
    """Returns the arguments of a server."""
    window = settings.flow_control_window_bytes
    return [
        *_options_of_both(settings, min(settings.max_message_bytes, limits.max_request_bytes)),
        ("grpc.http2.lookahead_bytes", min(window, PUBLIC_WINDOW_BYTES) if limits.is_public else window),
        *([("grpc.max_connection_idle_ms", IDLE_MS)] if limits.is_public else []),
        ("grpc.max_concurrent_streams", limits.max_calls),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # The name behind GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS has no "recv".
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 2),
        # Otherwise a second server on the same port would silently take half of the calls.
        ("grpc.so_reuseport", 0),
    ]


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Has a server listen, in plaintext without credentials, and returns the port.

    Raises:
        UnavailableError: the port is not available, or the host is none of this machine.
    """
    address = host_and_port(host, port)
    failure = UnavailableError(f"cannot listen on {address}: is something else running there?")
    if not is_of_this_machine(host):
        raise UnavailableError(f"cannot listen on {address}: {host} is no address of this machine")
    if is_taken(host, port):  # which gRPC would log in its own way
        raise failure
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except (RuntimeError, OSError) as error:
        raise failure from error


def _options_of_both(settings: ConnectionSettings, message_bytes: int) -> ChannelArguments:
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        # Both ends ping, also while no call is running: a gateway continues without a drafter that has vanished, and a
        # verifier frees the sessions of a gateway that has vanished.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.keepalive_timeout_s)),
        # The timeout in effect: gRPC 1.85 never starts the timer of the above, and without this one waits a minute.
        ("grpc.http2.ping_timeout_ms", _milliseconds(settings.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # BDP probing would override the window (with at least 4 MiB) and send additional pings.
        ("grpc.http2.bdp_probe", 0),
        # Draft distributions do not compress; trying takes longer than sending.
        ("grpc.default_compression_algorithm", int(grpc.Compression.NoCompression)),
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
    ]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1e3)


def check_prompt_fits(model: ModelDescription, most_bytes: int, setting: str = "max_message_bytes") -> None:
    """Checks that a request to open a session whose prompt fills the context fits into one message.

    Raises:
        InvalidRequestError: the setting is too small.
    """
    num_ids = model.context_length + 2 * model.vocab_size  # all tokens in allowed_token_ids and in stop_token_ids
    require_room(
        f"a prompt of {model.context_length} tokens, the context of {model.name}",
        num_ids * BYTES_PER_ID,
        most_bytes,
        setting,
    )


def require_room(what: str, most_bytes: int, limit_bytes: int, setting: str = "max_message_bytes") -> None:
    """Checks that content of at most `most_bytes` fits into one message.

    Raises:
        InvalidRequestError: it does not fit; the message names the content and the setting.
    """
    needed = most_bytes + ENVELOPE_BYTES
    if needed > limit_bytes:
        where = " at all services" if setting == "max_message_bytes" else ""
        raise InvalidRequestError(
            f"{setting} is {limit_bytes}, but {what}, can take {needed}: set it at least so high{where}, or serve"
            " something smaller"
        )


def in_messages(make: Callable[[Sequence[Item]], Message], items: Sequence[Item]) -> Iterator[Message]:
    """Yields messages with the items, at least one, in order: one, unless it is too large for a control stream."""
    message = make(items)
    if len(items) == 1 or message.ByteSize() <= LEAST_MESSAGE_BYTES:
        yield message
        return
    middle = len(items) // 2
    yield from in_messages(make, items[:middle])
    yield from in_messages(make, items[middle:])
