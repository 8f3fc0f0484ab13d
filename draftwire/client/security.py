"""TLS credentials and bearer token of a client."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from draftwire.errors import InvalidRequestError
from draftwire.runtime.addresses import host_of, is_loopback


@dataclass(frozen=True, slots=True)
class Security:
    """Certificates and token of one client; see `Client`."""

    tls_ca: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    tls_target_name: str | None = None
    token: str | None = None
    allow_plaintext: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequestError("tls_cert and tls_key come together: a certificate and its key")
        if self.tls_ca is None and (self.tls_cert is not None or self.tls_target_name is not None):
            raise InvalidRequestError(
                "tls_cert and tls_target_name need tls_ca: without it, the connection is plaintext"
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise InvalidRequestError("a token consists of printable ASCII characters")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call: the bearer token, if there is one."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def check_address(self, address: str) -> None:
        """Checks that the token does not leave this machine in plaintext, unless that is allowed.

        Raises:
            InvalidRequestError: it would.
        """
        is_safe = self.token is None or self.tls_ca is not None or is_loopback(host_of(address))
        if not is_safe and not self.allow_plaintext:
            raise InvalidRequestError(
                f"token: it would be sent to {address} without TLS, for everybody on the way to read: set tls_ca, or"
                " allow_plaintext where the network encrypts on its own"
            )

    def channel_opener(self, address: str, options: Sequence[tuple[str, int]], library: Any) -> Callable[[], Any]:
        """Reads the files, and returns what opens a channel of `library`, grpc or grpc.aio, to host:port.

        Raises:
            InvalidRequestError: a file cannot be read, or the token would travel in plaintext; see `check_address`.
        """
        self.check_address(address)
        name = self.tls_target_name
        own = [
            *options,
            # gRPC would use a proxy of the environment even for this machine, unless `no_proxy` names it.
            *([("grpc.enable_http_proxy", 0)] if is_loopback(host_of(address)) else []),
            *([("grpc.ssl_target_name_override", name)] if name is not None else []),
        ]
        if self.tls_ca is None:
            return partial(library.insecure_channel, address, options=own)
        key, cert = (_read(path, name) for path, name in ((self.tls_key, "tls_key"), (self.tls_cert, "tls_cert")))
        credentials = grpc.ssl_channel_credentials(_read(self.tls_ca, "tls_ca"), key, cert)
        return partial(library.secure_channel, address, credentials, options=own)


def _read(path: str | Path | None, option: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{option}: {path} cannot be read: {error.strerror}") from error
