"""Links to services that there are not, and a source that says where they would be."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from gateway_fakes import describe

from draftwire.errors import DraftwireError, InvalidRequestError, ModelMismatchError, UnavailableError
from draftwire.models.description import ModelDescription
from draftwire_gateway.peers.discovery import Endpoint, SourceStatus

RETRY_SECONDS = 0.5

_ports = count(1000)
"""Of as many digits each: sources sort addresses."""


@dataclass
class FakePeer:
    """A model server that answers, or fails, after a while."""

    model: ModelDescription
    seconds: float = 0.0
    error: DraftwireError | None = None
    tokens: list[str] = field(default_factory=lambda: ["a", "b"])
    recovers_at: float | None = None
    """When the error is over."""

    async def describe(self) -> ModelDescription:
        await asyncio.sleep(self.seconds)
        is_over = self.recovers_at is not None and asyncio.get_running_loop().time() > self.recovers_at
        if self.error is not None and not is_over:
            raise self.error
        return self.model

    async def vocabulary(self) -> list[str]:
        return self.tokens


class FakeLink:
    """As much of a link as pools and rosters look at."""

    def __init__(self, address: str = "", **state: Any) -> None:
        self.address = address or f"peer:{next(_ports)}"
        self.connected = True
        self.is_cooling_down = False
        self.is_well, self.is_silent = True, False
        self.num_sessions = 0
        self.zone: str | None = None
        self.has_left = asyncio.Event()
        self.fault: DraftwireError | None = None
        self.instance_id = 0
        self.quarantined: set[int] = set()
        self.known: dict[str, int] = {}
        """What verifiers know it by, by address."""
        self.peer = FakePeer(describe("target"))
        self.is_maintained = False
        self.num_disconnects = 0
        self.__dict__.update(state)

    @property
    def is_leaving(self) -> bool:
        return self.has_left.is_set()

    def known_as(self, address: str) -> int:
        return self.known.get(address, self.instance_id)

    def takes_blocks_of(self, drafter_id: int) -> bool:
        return drafter_id not in self.quarantined

    async def maintain(self, check: Any) -> None:
        """Asks until it is answered, as real links do, and notes why the service cannot be used."""
        self.is_maintained = True
        try:
            while True:
                try:
                    await check(self, await self.peer.describe())
                    await asyncio.Event().wait()
                except UnavailableError:
                    pass
                except (ModelMismatchError, InvalidRequestError) as error:
                    self.fault = error
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self.is_maintained = False

    async def disconnect(self) -> None:
        assert not self.is_maintained
        self.num_disconnects += 1


@dataclass
class ListedSource:
    """Says where services are, once, after a while."""

    addresses: Sequence[str]
    after_s: float = 0.0
    status: SourceStatus = field(default_factory=SourceStatus)

    @property
    def name(self) -> str:
        return ", ".join(self.addresses)

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        self.status.fault = "nobody knows" if self.after_s else ""
        await asyncio.sleep(self.after_s)
        yield frozenset(map(Endpoint, self.addresses))
