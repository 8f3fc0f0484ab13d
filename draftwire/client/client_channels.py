"""What gRPC is told about a client's connections, and how long a gateway is waited for."""

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import grpc

from draftwire.client.call_errors import error_of
from draftwire.client.request_maker import check_number
from draftwire.client.retry_policy import seconds_until
from draftwire.errors import InvalidRequestError, UnavailableError

Choice = TypeVar("Choice")

DEFAULT_ADDRESS = "127.0.0.1:50051"
ANSWER_SECONDS = 10.0
"""How long gateways may take to say what they serve."""
LEAST_ANSWER_SECONDS = 0.1
"""How long they may take at least, however soon they are to be ready."""
LOADING_PAUSE_S = 0.2
"""Between questions to a gateway that is up, but does not serve yet."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    # While the gateway reads a long prompt, nothing is sent for minutes, and what stands in between forgets silent
    # connections: load balancers after a minute, address translators (NAT) after a few. So the gateway is asked every
    # 30 s whether it is still there, for as long as a completion runs; without an answer within 20 s the completion
    # fails instead of waiting for ever. Gateways allow far more pings than that.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # gRPC 1.85 waits a minute without it, whatever the line above says
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Texts are short: compressing would cost time at every token.
    ("grpc.default_compression_algorithm", int(grpc.Compression.NoCompression)),
]


def addresses_of(address: str | Sequence[str]) -> list[str]:
    """Returns each host:port of a list, or of a text that commas separate.

    Raises:
        InvalidRequestError: there is none, or one is empty.
    """
    addresses = [one.strip() for one in (address.split(",") if isinstance(address, str) else address)]
    if not addresses or not all(addresses):
        raise InvalidRequestError("address: no gateway, or an empty one, such as behind a trailing comma")
    return addresses


def in_turn(choices: Sequence[Choice], timeout_s: float) -> Iterator[tuple[Choice, float]]:
    """Yields what to try one after the other, each with the seconds that it may take: its share of what is left."""
    deadline = time.monotonic() + timeout_s
    for number, choice in enumerate(choices):
        yield choice, seconds_until(deadline) / (len(choices) - number)


class Readiness:
    """How long gateways may still take to come up."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        """Time runs from now on.

        Raises:
            InvalidRequestError: the seconds are no number.
        """
        check_number("timeout_s", timeout_s)
        self._addresses = ", ".join(addresses)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + max(timeout_s, LEAST_ANSWER_SECONDS)

    @property
    def left_s(self) -> float:
        """How long the next question may take. It does not wait for the connection, and so its failure says why there
        is none: a certificate, say.
        """
        return self._deadline - time.monotonic()

    def check(self, error: grpc.RpcError) -> None:
        """Returns if it is worth while to ask again, after a pause.

        Raises:
            DraftwireError: it does not help, or there is no time left for it.
        """
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise error_of(error) from error
        if self.left_s <= LOADING_PAUSE_S:
            raise UnavailableError(
                f"no gateway answered at {self._addresses} within {self._timeout_s:g} s ({error.details()}); "
                "`draftwire up` starts one"
            ) from error
