"""Channels to other services."""

import grpc

Options = list[tuple[str, int | str]]


def limits(max_message_bytes: int) -> Options:
    """Returns the options that both ends of every connection share."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def open_channel(address: str, max_message_bytes: int, *, separate: bool = False) -> grpc.aio.Channel:
    """Returns a plaintext channel.

    Args:
        address: host:port.
        max_message_bytes: largest message in either direction.
        separate: on a TCP connection of its own, so that large messages do not delay those of other channels. (Equal
            channels share one connection otherwise.)
    """
    options = [
        *limits(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", int(separate)),
    ]
    return grpc.aio.insecure_channel(address, options=options)
