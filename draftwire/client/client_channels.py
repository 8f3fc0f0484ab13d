"""Channel options of the clients, addresses of gateways, and waiting until one is ready."""

import re
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
"""Timeout of `GetServer`, over all gateways."""
LEAST_ANSWER_SECONDS = 0.1
"""Least time for gateways to answer in `wait_ready`, even with a shorter timeout."""
LOADING_PAUSE_S = 0.2
"""Pause between calls to gateways that do not serve yet."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    # During the prefill of a long prompt nothing is sent for minutes, and middleboxes drop idle connections: load
    # balancers after a minute, NAT after a few. So the client pings every 30 s while a completion runs; without an
    # answer within 20 s the completion fails instead of waiting for ever. Gateways allow far more pings than that.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # without it, gRPC 1.85 waits a minute, despite the line above
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Messages are short: compression would cost time at every token.
    ("grpc.default_compression_algorithm", int(grpc.Compression.NoCompression)),
]


def addresses_of(address: str | Sequence[str]) -> list[str]:
    """Returns each host:port of a list, or of a comma-separated text.

    Raises:
        InvalidRequestError: there is no address, or an address is empty, a URL, or without a port.
    """
    addresses = [part.strip() for part in (address.split(",") if isinstance(address, str) else address)]
    if not addresses or not all(addresses):
        raise InvalidRequestError("address: no gateway, or an empty one, such as behind a trailing comma")
    for one in addresses:
        if one.startswith(("http://", "https://")):
            raise InvalidRequestError(
                f"address: {one} is an HTTP address; name the gateway's gRPC port, such as {DEFAULT_ADDRESS}"
            )
        if ":" not in one:
            default = DEFAULT_ADDRESS.rpartition(":")[2]
            raise InvalidRequestError(f"address: {one} has no port; a gateway's is {default} where nothing else is set")
        if re.fullmatch(r"(?!unix:)[^/:]*:[^/:]*[^/:0-9][^/:]*", one):
            raise InvalidRequestError(f"address: the port of {one} is no number")
    return addresses


REMEDIES = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of an issuer that is not in the file tls_ca (--tls-ca)",
    "Hostname Verification": "its certificate has another name: tls_target_name (--tls-target-name)",
    "WRONG_VERSION_NUMBER": "it listens without TLS: leave tls_ca out (--tls-ca, DRAFTWIRE_TLS_CA)",
    "Socket closed": "if it wants TLS, tls_ca names the issuer of its certificate (--tls-ca)",
}
"""Remedies of failed connections, by words of gRPC's reason."""


def in_turn(choices: Sequence[Choice], timeout_s: float) -> Iterator[tuple[Choice, float]]:
    """Yields the choices in turn, each with its timeout in seconds: an equal share of the remaining time."""
    deadline = time.monotonic() + timeout_s
    for number, choice in enumerate(choices):
        yield choice, seconds_until(deadline) / (len(choices) - number)


class Readiness:
    """Deadline for gateways to become ready."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        """Starts the timeout.

        Raises:
            InvalidRequestError: `timeout_s` is not a number.
        """
        check_number("timeout_s", timeout_s)
        self._addresses = ", ".join(addresses)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + max(timeout_s, LEAST_ANSWER_SECONDS)

    @property
    def left_s(self) -> float:
        """Timeout of the next call. Calls do not use wait-for-ready, so their failure holds the reason why there is no
        connection, such as a certificate.
        """
        return self._deadline - time.monotonic()

    def check(self, error: grpc.RpcError) -> None:
        """Returns if the call is worth a retry, after a pause.

        Raises:
            DraftwireError: a retry does not help, or there is no time left.
        """
        own_error = error_of(error)
        may_pass = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if not may_pass or isinstance(own_error, InvalidRequestError):
            raise own_error from error
        if self.left_s <= LOADING_PAUSE_S:
            raise UnavailableError(
                f"no gateway answered at {self._addresses} within {self._timeout_s:g} s ({error.details()}); "
                f"{_remedy(str(error.details()))}"
            ) from error


def _remedy(details: str) -> str:
    """Returns what to do about a connection that failed for a reason of gRPC's."""
    return next((remedy for sign, remedy in REMEDIES.items() if sign in details), "`draftwire up` starts one")
