"""Discovery of verifiers and drafters: static addresses and DNS names. Kubernetes: see `endpoint_slices`."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from draftwire.runtime.addresses import host_and_port
from draftwire.runtime.daemon_threads import DaemonThreads

DNS_SECONDS = 5.0
"""Pause between two look-ups of the same names."""

DNS_TIMEOUT_SECONDS = 10.0
"""Timeout of a look-up."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and state of one instance of a service."""

    address: str
    """host:port."""
    zone: str | None = None
    """Zone of the machine, if known: instances in the same zone are near each other."""
    is_ready: bool = True
    """Whether the instance is ready for new sessions."""
    is_terminating: bool = False
    """Whether the instance is shutting down."""

    @property
    def takes_sessions(self) -> bool:
        """Whether new sessions may be opened on it."""
        return self.is_ready and not self.is_terminating


@dataclass(slots=True)
class SourceStatus:
    """Synchronisation state of a source. Written on the event loop, read on any thread."""

    num_failures: int = 0
    """Number of failed queries."""
    synced_at: float | None = None
    """Time at which the endpoints were last confirmed, by `time.monotonic`; None before that, or if they never
    change."""
    fault: str = ""
    """Reason why the last query failed; empty after a success."""

    def record_success(self, where: str) -> None:
        """Records that the endpoints were confirmed now."""
        self.synced_at = time.monotonic()
        if self.fault:
            self.fault = ""
            log.info("gateway.discovery_recovered", source=where)

    def record_failure(self, where: str, reason: str, *, is_lasting: bool = False) -> None:
        """Counts a failure, and logs the first one after a success; a lasting one, where an operator has to act,
        whenever its reason is new.
        """
        self.num_failures += 1
        if is_lasting and reason != self.fault:
            log.error("gateway.discovery_failed", source=where, reason=reason)
        elif not self.fault:
            log.warning("gateway.discovery_failed", source=where, reason=reason)
        self.fault = reason


class Source(Protocol):
    """Source of the endpoints of verifiers or of drafters."""

    @property
    def name(self) -> str:
        """Name of the source in logs and messages."""

    @property
    def status(self) -> SourceStatus:
        """Synchronisation state."""

    def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        """Yields the whole set of endpoints whenever it may have changed. Ends if it never changes again.

        While queries fail, nothing is yielded: the last set stays valid.
        """


@dataclass(frozen=True, slots=True)
class StaticSource:
    """Addresses that were configured."""

    addresses: tuple[str, ...]
    """host:port of each."""
    status: SourceStatus = field(default_factory=SourceStatus)

    @property
    def name(self) -> str:
        """The addresses."""
        return ", ".join(self.addresses)

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        """Yields the addresses, once."""
        yield frozenset(Endpoint(address) for address in self.addresses)


@dataclass(frozen=True, slots=True)
class DnsSource:
    """DNS names with an address record for each instance, such as headless services in Kubernetes."""

    names: tuple[str, ...]
    """name:port of each."""
    pause_s: float = DNS_SECONDS
    """Pause between two look-ups, seconds."""
    status: SourceStatus = field(default_factory=SourceStatus)

    @property
    def name(self) -> str:
        """The names."""
        return ", ".join(self.names)

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        """Yields the addresses of all names after each look-up. A name that fails keeps its last addresses."""
        known: dict[str, frozenset[Endpoint]] = {}
        with closing(_Resolver(len(self.names))) as resolver:
            while True:
                faults = []
                for name in self.names:
                    try:
                        known[name] = frozenset(map(Endpoint, await resolver.look_up(name)))
                    except (OSError, UnicodeError) as error:  # TimeoutError and gaierror are OSErrors
                        faults.append(f"{name}: {str(error) or type(error).__name__}")
                if faults:
                    self.status.record_failure(self.name, "; ".join(faults))
                else:
                    self.status.record_success(self.name)
                if known:
                    yield frozenset().union(*known.values())
                await asyncio.sleep(self.pause_s)


class _Resolver:
    """Looks names up with the system's resolver, on a thread for each name. A look-up cannot be interrupted: one that
    timed out is waited for again, so that a resolver that hangs holds no thread but these.
    """

    def __init__(self, num_names: int) -> None:
        self._threads = DaemonThreads(num_names, "dns")
        self._running: dict[str, Future[list[Any]]] = {}

    async def look_up(self, name: str) -> Sequence[str]:
        """Returns host:port for each address of a name.

        Raises:
            OSError: the look-up failed or timed out.
        """
        host, _, port = name.rpartition(":")
        job = self._running.get(name)
        if job is None:
            job = self._threads.submit(socket.getaddrinfo, host, int(port), type=socket.SOCK_STREAM)
            self._running[name] = job
        try:
            async with asyncio.timeout(DNS_TIMEOUT_SECONDS):
                found = await asyncio.wrap_future(job)
        finally:
            if job.done():
                del self._running[name]
        return [host_and_port(str(address[0]), int(port)) for *_, address in found]

    def close(self) -> None:
        """Ends the threads, each after its look-up."""
        self._threads.stop()
