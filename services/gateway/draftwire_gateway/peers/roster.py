"""The links to all services of one kind, which come and go as a source says."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

import structlog

from draftwire.errors import DraftwireError
from draftwire_gateway.peers.discovery import Endpoint, Source, SourceStatus
from draftwire_gateway.peers.wire import Check, DrafterLink, VerifierLink

IDLE_POLL_SECONDS = 0.2
"""How often it is looked whether a service that left has lost its last session."""

log = structlog.get_logger()

Link = TypeVar("Link", VerifierLink, DrafterLink)


class Roster(Generic[Link]):
    """Holds a link to each service that takes sessions, and to those that left and still have some.

    A service leaves when its endpoint is gone, terminates or is not ready. Its sessions go on; when the last one has
    ended, the link is closed and freed. If the endpoint is back before that, the link is taken again.
    """

    def __init__(self, role: str, source: Source, connect: Callable[[str], Link]) -> None:
        """Prepares; `run` does the work.

        Args:
            role: names the kind of service in logs and metrics.
            source: knows where the services are.
            connect: makes the link to host:port, which is not open yet.
        """
        self.role = role
        self._source = source
        self._connect: Callable[[str], Link] = connect
        self._endpoints: Mapping[str, Endpoint] = {}
        self._links: dict[str, Link] = {}

    @property
    def links(self) -> Sequence[Link]:
        """Those to services that take sessions, connected or not."""
        return [link for link in self._links.values() if not link.is_leaving]

    @property
    def connected(self) -> Sequence[Link]:
        """Those that sessions can be opened on now."""
        return [link for link in self.links if link.connected]

    @property
    def where(self) -> str:
        """Where the services are sought, and why they cannot be."""
        fault = self._source.status.fault
        return f"{self._source.name} ({fault})" if fault else self._source.name

    @property
    def fault(self) -> DraftwireError | None:
        """Why no service can be used, if there are some and none can."""
        faults = [link.fault for link in self.links]
        return faults[0] if all(faults) and faults else None

    @property
    def status(self) -> SourceStatus:
        """How well the source knows what it says."""
        return self._source.status

    def num_by_state(self) -> Mapping[str, int]:
        """Returns how many services are in which state. May be called on any thread."""
        states = dict.fromkeys(("connected", "connecting", "unfit", "unready", "leaving"), 0)
        links = dict(self._links)
        unready = sum(address not in links for address in tuple(self._endpoints))
        return states | Counter(map(_state, links.values())) | ({"unready": unready} if unready else {})

    async def run(self, check: Check) -> None:
        """Keeps the links as the source says, for ever.

        Args:
            check: raises why a service with some model cannot be used.
        """
        async with asyncio.TaskGroup() as group, aclosing(self._source.endpoints()) as changes:
            async for endpoints in changes:
                ranked = sorted(endpoints, key=lambda endpoint: endpoint.takes_sessions)  # of two, the one that does
                for address in self._follow({endpoint.address: endpoint for endpoint in ranked}):
                    group.create_task(self._keep(self._links[address], check))

    def _follow(self, endpoints: Mapping[str, Endpoint]) -> Sequence[str]:
        """Takes what the source says now, and returns the addresses of links that are new."""
        self._endpoints = endpoints
        wanted = {address: endpoint for address, endpoint in endpoints.items() if endpoint.takes_sessions}
        new = sorted(wanted.keys() - self._links.keys())
        self._links.update({address: self._connect(address) for address in new})
        for address, link in self._links.items():
            if address in wanted:
                link.zone = wanted[address].zone
            if address in wanted and (link.is_leaving or address in new):
                link.has_left.clear()
                log.info("gateway.peer_found", role=self.role, address=address, zone=link.zone)
            elif address not in wanted and not link.is_leaving:
                link.has_left.set()
                log.info("gateway.peer_left", role=self.role, address=address, reason=_reason(endpoints.get(address)))
        return new

    async def _keep(self, link: Link, check: Check) -> None:
        """Keeps a link open until its service has left and its last session has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                upkeep = group.create_task(link.maintain(check))
                while not link.is_leaving or link.num_sessions:
                    await link.has_left.wait()
                    await asyncio.sleep(IDLE_POLL_SECONDS)
                del self._links[link.address]  # from here on, an endpoint that is back gets a new link
                upkeep.cancel()
        finally:
            await link.disconnect()


def _state(link: VerifierLink | DrafterLink) -> str:
    if link.is_leaving:
        return "leaving"
    if link.fault is not None:
        return "unfit"
    return "connected" if link.connected else "connecting"


def _reason(endpoint: Endpoint | None) -> str:
    if endpoint is None:
        return "gone"
    return "terminating" if endpoint.is_terminating else "not ready"
