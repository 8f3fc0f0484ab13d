"""TLS: certificate and key files, credentials of servers and channels, and their renewal."""

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from typing_extensions import override

from draftwire.errors import InvalidRequestError
from draftwire.runtime.addresses import host_of
from draftwire.runtime.certificates import ExpiryLog, Validity, validities
from draftwire.runtime.channels import client_options
from draftwire.runtime.settings import ConnectionSettings, TlsSettings, require
from draftwire.runtime.watched_files import WatchedFiles, read_bytes

OLD_CHANNEL_SECONDS = 600.0
"""Grace period of calls on a channel whose certificates have been replaced. They have deadlines of their own."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Validated contents of a service's TLS files."""

    chain: bytes | None
    """PEM certificates of the service and those between it and its issuer."""
    key: bytes | None
    """PEM private key of the first of them."""
    ca: bytes | None
    """PEM certificates of the trusted issuers."""
    validities: Mapping[str, Validity] = field(default_factory=dict)
    """Validity of the certificates of each option: the first to expire of the chain that is shown, and the last of the
    issuers, without which nobody is believed."""


class TlsFiles(WatchedFiles[TlsMaterial]):
    """The TLS files of a service. Whoever looks at them has their expiry logged, if that is near or past.

    An expired certificate ends nothing: its service can still be reached by whoever does not check it, and has to be,
    to be mended.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], TlsMaterial]) -> None:
        super().__init__("certificates", paths, read)
        self._expiry_log = ExpiryLog()
        self.current()

    @override
    def current(self) -> TlsMaterial:
        """See `WatchedFiles`; called at every handshake, and when metrics are read."""
        material = super().current()
        self._expiry_log.check(material.validities)
        return material


def watch_tls(settings: TlsSettings) -> TlsFiles | None:
    """Reads and watches the TLS files of a service. Returns None if it uses no TLS.

    Raises:
        InvalidRequestError: a file is missing, unreadable or malformed; the message names it and its option.
    """
    paths = [path for path in (settings.tls_cert, settings.tls_key, settings.tls_ca) if path is not None]
    return TlsFiles(paths, lambda: read_material(settings)) if paths else None


def read_material(settings: TlsSettings) -> TlsMaterial:
    """Reads and validates the TLS files; errors are those of `watch_tls`."""
    chain = key = ca = None
    found: dict[str, Validity] = {}
    if settings.tls_cert is not None and settings.tls_key is not None:
        chain, key = read_bytes(settings.tls_cert, "tls_cert"), read_bytes(settings.tls_key, "tls_key")
        _check_identity(settings.tls_cert, settings.tls_key)
        if of_chain := validities(chain):
            found["tls_cert"] = min(of_chain, key=lambda one: one.end)
    if settings.tls_ca is not None:
        ca = read_bytes(settings.tls_ca, "tls_ca")
        _check_certificates(settings.tls_ca, "tls_ca")
        if of_issuers := validities(ca):
            found["tls_ca"] = max(of_issuers, key=lambda one: one.end)
    return TlsMaterial(chain, key, ca, found)


def expiries_of(files: TlsFiles | None) -> Mapping[str, float]:
    """Returns when the certificates of each option expire, seconds since 1970; empty without TLS."""
    if files is None:
        return {}
    return {option: validity.end for option, validity in files.current().validities.items()}


def server_credentials(files: TlsFiles | None, settings: TlsSettings) -> grpc.ServerCredentials | None:
    """Returns the credentials of a gRPC server, None for plaintext. Every handshake uses the current files."""
    if files is None or settings.tls_cert is None:
        return None
    used = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at every handshake, on a thread of gRPC; None keeps the current certificates."""
        nonlocal used
        now = files.current()
        if now is used:
            return None
        used = now
        return _certificate_configuration(now, settings)

    first = _certificate_configuration(used, settings)
    return grpc.dynamic_ssl_server_credentials(first, changed, settings.requires_client_cert)  # type: ignore[arg-type]  # a callback may return None


def server_context(files: TlsFiles | None, settings: TlsSettings) -> ssl.SSLContext | None:
    """Returns the SSL context of a server other than gRPC's, None for plaintext.

    Every handshake uses the current files.
    """
    if files is None or settings.tls_cert is None:
        return None
    used = files.current()
    made = _server_context(used, settings)

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _first: ssl.SSLContext) -> None:
        """Called at every handshake, on the event loop."""
        nonlocal used, made
        now = files.current()
        if now is not used:
            # The files changed again meanwhile, or OpenSSL rejects them: keep the context; the next handshake retries.
            with suppress(OSError, TypeError, ValueError):
                made = _server_context(now, settings)
                used = now
        connection.context = made

    first = _server_context(used, settings)
    first.sni_callback = choose  # called also for clients that send no SNI
    return first


def _server_context(material: TlsMaterial, settings: TlsSettings) -> ssl.SSLContext:
    assert settings.tls_cert is not None, "a server has a certificate, or no TLS"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_TICKET  # a resumed session would not show its certificate again
    context.num_tickets = 0
    context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    if settings.requires_client_cert and material.ca is not None:
        # Comments between the certificates may be in any encoding; `ssl` accepts only ASCII here.
        context.load_verify_locations(cadata=material.ca.decode("ascii", errors="ignore"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _certificate_configuration(material: TlsMaterial, settings: TlsSettings) -> grpc.ServerCertificateConfiguration:
    assert material.key is not None, "a server has a certificate, or no TLS"
    assert material.chain is not None, "which comes with its key"
    ca = material.ca if settings.requires_client_cert else None
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], ca)


class Dialler:
    """Opens a service's channels to other services: over TLS only if `tls_ca` is set, else in plaintext."""

    def __init__(self, connections: ConnectionSettings, settings: TlsSettings, files: TlsFiles | None) -> None:
        self.connections = connections
        self._settings = settings
        self._files = files if settings.tls_ca is not None else None

    @property
    def material(self) -> TlsMaterial | None:
        """Current TLS material: a new object if the files have changed. None in plaintext."""
        return self._files.current() if self._files is not None else None

    def open(self, address: str, *, bulk: bool) -> grpc.aio.Channel:
        """Returns a channel to host:port that uses the current TLS files for its whole life.

        A `bulk` one is for large messages, on a TCP connection of its own, so that they do not delay commands and
        events.

        Raises:
            InvalidRequestError: another machine would be called in plaintext, which is not allowed. Addresses that are
                configured are checked at start; a drafter is told others by gateways.
        """
        self._settings.check_dialling(host_of(address))
        options = client_options(self.connections, bulk=bulk)
        material = self.material
        if material is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.chain)
        name = self._settings.tls_target_name
        named = [("grpc.ssl_target_name_override", name)] if name is not None else []
        return grpc.aio.secure_channel(address, credentials, options=[*options, *named])


class RenewedChannel:
    """A channel to one address that is replaced when the certificates have changed.

    gRPC reconnects on its own, but with the certificates of the channel's creation, which may have expired.
    """

    def __init__(self, dialler: Dialler, address: str, *, bulk: bool) -> None:
        """Opens the channel; see `Dialler.open`."""
        self._open: Callable[[], grpc.aio.Channel] = lambda: dialler.open(address, bulk=bulk)
        self._dialler = dialler
        self._material = dialler.material
        self._channel = self._open()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self) -> grpc.aio.Channel:
        """Returns the channel for the next call. Running calls on an older one may finish, for a while."""
        material = self._dialler.material
        if material is not self._material:
            closing = asyncio.create_task(self._channel.close(OLD_CHANNEL_SECONDS))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._material, self._channel = material, self._open()
        return self._channel

    async def close(self) -> None:
        """Closes the channel and ends its running calls. Replaced channels close once their calls have finished."""
        await self._channel.close()


def _check_identity(cert: Path, key: Path) -> None:
    _check_certificates(cert, "tls_cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # without `password`, OpenSSL would prompt for it
    except OSError as error:  # SSLError is a subclass
        is_other = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
        fault = f"is not the key of {cert}" if is_other else "is not a PEM key without a password"
        raise InvalidRequestError(f"tls_key: {key} {fault}") from error


def _check_certificates(path: Path, option: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except OSError as error:  # SSLError is a subclass
        raise InvalidRequestError(f"{option}: {path} is not a PEM file of certificates") from error
    require(context.cert_store_stats()["x509"] > 0, f"{option}: {path} holds no certificate")
