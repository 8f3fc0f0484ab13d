"""Links to all instances of a service, which follow the endpoints of a source."""

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
"""Interval of checking whether a service that left has ended its last session."""

log = structlog.get_logger()

Link = TypeVar("Link", VerifierLink, DrafterLink)


class Roster(Generic[Link]):
    """Holds a link to each service that takes sessions, and to those that left with open sessions.

    A service leaves when its endpoint is gone, terminates or is not ready. Its sessions go on; when the last one has
    ended, the link is closed and dropped. If the endpoint returns before that, its link is reused.
    """

    def __init__(self, role: str, source: Source, connect: Callable[[str], Link]) -> None:
        """Connects nothing before `run`. `connect` makes an unopened link to host:port."""
        self.role = role
        self._source = source
        self._connect: Callable[[str], Link] = connect
        self._endpoints: Mapping[str, Endpoint] = {}
        self._links: dict[str, Link] = {}

    @property
    def links(self) -> Sequence[Link]:
        """Links to services that take sessions, connected or not."""
        return [link for link in self._links.values() if not link.is_leaving]

    @property
    def connected(self) -> Sequence[Link]:
        """Links that sessions can be opened on now."""
        return [link for link in self.links if link.connected]

    @property
    def where(self) -> str:
        """Name of the source, and its fault if queries fail."""
        fault = self._source.status.fault
        return f"{self._source.name} ({fault})" if fault else self._source.name

    @property
    def fault(self) -> DraftwireError | None:
        """The fault of the first link if all links have one; else None."""
        faults = [link.fault for link in self.links]
        return faults[0] if all(faults) and faults else None

    @property
    def status(self) -> SourceStatus:
        """Synchronisation state of the source."""
        return self._source.status

    def num_by_state(self) -> Mapping[str, int]:
        """Returns the number of services in each state. Thread-safe."""
        states = dict.fromkeys(("connected", "silent", "connecting", "unfit", "unready", "leaving"), 0)
        links = dict(self._links)
        unready = sum(address not in links for address in tuple(self._endpoints))
        return states | Counter(map(_state, links.values())) | ({"unready": unready} if unready else {})

    async def run(self, check: Check) -> None:
        """Keeps a link to each endpoint of the source, for ever."""
        async with asyncio.TaskGroup() as group, aclosing(self._source.endpoints()) as changes:
            async for endpoints in changes:
                # Of two endpoints with the same address, the one that takes sessions counts.
                ranked = sorted(endpoints, key=lambda endpoint: endpoint.takes_sessions)
                for address in self._follow({endpoint.address: endpoint for endpoint in ranked}):
                    group.create_task(self._keep(self._links[address], check))

    def _follow(self, endpoints: Mapping[str, Endpoint]) -> Sequence[str]:
        """Updates the links for a new set of endpoints, and returns the addresses of new links."""
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
                del self._links[link.address]  # from here on, a returning endpoint gets a new link
                upkeep.cancel()
        finally:
            await link.disconnect()


def _state(link: VerifierLink | DrafterLink) -> str:
    if link.is_leaving:
        return "leaving"
    if link.fault is not None:
        return "unfit"
    if not link.connected:
        return "connecting"
    return "silent" if link.is_silent else "connected"


def _reason(endpoint: Endpoint | None) -> str:
    if endpoint is None:
        return "gone"
    return "terminating" if endpoint.is_terminating else "not ready"
