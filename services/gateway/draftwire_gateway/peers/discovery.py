"""Where verifiers and drafters are: a list, names that are looked up again and again, or Kubernetes."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

DNS_SECONDS = 5.0
"""Between two look-ups of the same names."""

DNS_TIMEOUT_SECONDS = 10.0
"""How long a look-up may take."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place where a service is."""

    address: str
    """host:port."""
    zone: str | None = None
    """Where the machine stands, if that is known: two with the same zone are near each other."""
    is_ready: bool = True
    """Whether it says that it is ready for new work."""
    is_serving: bool = True
    """Whether it works, be it on its way out."""
    is_terminating: bool = False
    """Whether it is on its way out."""

    @property
    def takes_sessions(self) -> bool:
        """Whether new sessions may be opened there."""
        return self.is_ready and not self.is_terminating


@dataclass(slots=True)
class SourceStatus:
    """How well a source knows what it says. Written on the event loop, read on any thread."""

    num_failures: int = 0
    """Times that it could not be asked."""
    synced_at: float | None = None
    """When what it says was last known to be true, by `time.monotonic`; None before that, or if it cannot change."""
    fault: str = ""
    """Why it cannot be asked now; empty while it can."""

    def note_success(self, where: str) -> None:
        """Takes note that what is known is true now."""
        self.synced_at = time.monotonic()
        if self.fault:
            self.fault = ""
            log.info("gateway.discovery_recovered", source=where)

    def note_failure(self, where: str, reason: str, *, is_lasting: bool = False) -> None:
        """Counts a failure, and logs the first one after a success.

        Args:
            where: names the source.
            reason: what happened.
            is_lasting: whether somebody has to do something about it. That is logged after other failures too.
        """
        self.num_failures += 1
        if is_lasting and reason != self.fault:
            log.error("gateway.discovery_failed", source=where, reason=reason)
        elif not self.fault:
            log.warning("gateway.discovery_failed", source=where, reason=reason)
        self.fault = reason


class Source(Protocol):
    """Knows where the services of one kind are."""

    @property
    def name(self) -> str:
        """Names the source to people."""

    @property
    def status(self) -> SourceStatus:
        """How well it knows."""

    def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        """Yields the whole set of endpoints whenever it may have changed. Ends if it never changes again.

        A source that cannot be asked yields nothing: what it said before stays in force.
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
    """Names with an address record for each service, such as those of headless services in Kubernetes."""

    names: tuple[str, ...]
    """name:port of each."""
    pause_s: float = DNS_SECONDS
    """Between two look-ups, seconds."""
    status: SourceStatus = field(default_factory=SourceStatus)

    @property
    def name(self) -> str:
        """The names."""
        return ", ".join(self.names)

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        """Yields the addresses of all names after each look-up. A name without one counts as a failed look-up."""
        known: dict[str, frozenset[Endpoint]] = {}
        while True:
            faults = []
            for name in self.names:
                try:
                    known[name] = frozenset(map(Endpoint, await _look_up(name)))
                except (OSError, UnicodeError) as error:  # TimeoutError and gaierror are OSErrors
                    faults.append(f"{name}: {str(error) or type(error).__name__}")
            if faults:
                self.status.note_failure(self.name, "; ".join(faults))
            else:
                self.status.note_success(self.name)
            if known:
                yield frozenset().union(*known.values())
            await asyncio.sleep(self.pause_s)


async def _look_up(name: str) -> Sequence[str]:
    """Returns host:port of all addresses of a name.

    Raises:
        OSError: it cannot be looked up, or not in time.
    """
    host, _, port = name.rpartition(":")
    async with asyncio.timeout(DNS_TIMEOUT_SECONDS):
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return [host_and_port(str(address[0]), int(port)) for *_, address in found]


def host_and_port(host: str, port: int) -> str:
    """Returns an address as gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
