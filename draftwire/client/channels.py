"""What gRPC is told about a client's connections, and how long a gateway is waited for."""

import time
from collections.abc import Sequence

import grpc

from draftwire.client.status import error_of
from draftwire.errors import UnavailableError

DEFAULT_ADDRESS = "127.0.0.1:50051"
ANSWER_SECONDS = 10.0
"""How long a gateway may take to say what it serves."""
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
    """Returns each host:port of a list, or of a text that commas separate."""
    return [one.strip() for one in (address.split(",") if isinstance(address, str) else address)]


class Readiness:
    """How long gateways may still take to come up."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        """Time runs from now on."""
        self._addresses = ", ".join(addresses)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.waits = len(addresses) == 1
        """Whether a call may wait for the connection: where there are several, one that is down must not keep us from
        the others."""

    @property
    def left_s(self) -> float:
        """How long the next question may take."""
        return max(self._deadline - time.monotonic(), 0.1)

    def is_given_up(self, error: grpc.RpcError) -> bool:
        """Whether the time is over.

        Raises:
            DraftwireError: it does not help to ask again.
        """
        if time.monotonic() > self._deadline:
            return True
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise error_of(error) from error
        return False

    def failure(self, error: grpc.RpcError) -> UnavailableError:
        """Returns what to tell the user, with the reason of a call that did not wait: one that did does not say why."""
        why = f" ({error.details()})"
        return UnavailableError(
            f"no gateway answered at {self._addresses} within {self._timeout_s:g} s{why}; `draftwire up` starts one"
        )
