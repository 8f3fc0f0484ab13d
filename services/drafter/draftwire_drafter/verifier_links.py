"""The drafter's links to verifiers, one for each, which all sessions of that verifier share."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol

from draftwire.errors import UnavailableError
from draftwire.method.rounds import DraftBlock
from draftwire.models.card import ModelCard
from draftwire.options.heads.features import FeatureRequest

MAX_IDLE_LINKS = 64
"""Links to verifiers that are kept without a session, for the next one. Gateways may name any verifiers."""


class BlockLink(Protocol):
    """Connection to one verifier, for draft blocks."""

    @property
    def broken(self) -> bool:
        """Whether the connection was lost; a broken link stays broken."""

    @property
    def drafter_id(self) -> int:
        """Number of this drafter at the verifier: of the identity that it issued or, if it issues none, the instance
        id.
        """

    def push(self, block: DraftBlock) -> None:
        """Queues a block to be sent.

        Raises:
            UnavailableError: the link is broken.
        """

    def request_features(self, request: FeatureRequest) -> None:
        """Queues a request of features, which then come as long as the link is not broken. Raises as `push`."""

    async def close(self) -> None:
        """Closes the connection. The link is broken then, and nobody is told that it was lost."""


Connect = Callable[[str, ModelCard, Callable[[], None]], Awaitable[BlockLink]]
"""Opens a link to the verifier at an address, or raises a `DraftwireError`. The last argument is called once, on the
event loop, when the link breaks."""


class VerifierLinks:
    """Opens links when they are asked for, and closes those that no session uses if there are too many."""

    def __init__(self, connect: Connect, used: Callable[[], Collection[str]], on_lost: Callable[[str], None]) -> None:
        """Starts without links.

        Args:
            connect: opens one.
            used: returns the addresses of the verifiers that open sessions have.
            on_lost: called with the address of a verifier when the link to it breaks.
        """
        self._connect, self._used, self._on_lost = connect, used, on_lost
        self._links: dict[str, BlockLink] = {}
        self._connecting: dict[str, asyncio.Task[BlockLink]] = {}

    def get(self, address: str) -> BlockLink:
        """Returns the link to a verifier.

        Raises:
            UnavailableError: there is none: the gateway sent a calibration before the session was open.
        """
        link = self._links.get(address)
        if link is None:
            raise UnavailableError(f"verifier at {address} is not reached yet")
        return link

    async def reach(self, address: str, card: ModelCard) -> BlockLink:
        """Returns the link to a verifier; opens it if there is none or it is broken. `card` is of the drafter's model.

        Whoever asks while it is being opened awaits the same attempt, and fails with it: one after the other, each
        would wait for the timeouts of all before it.
        """
        link = self._links.get(address)
        if link is not None and not link.broken:
            return link
        connecting = self._connecting.get(address)
        if connecting is None:
            connecting = self._connecting[address] = asyncio.create_task(self._open(address, card))
            connecting.add_done_callback(retrieve)
        return await asyncio.shield(connecting)  # the others still await it when one gives up

    async def _open(self, address: str, card: ModelCard) -> BlockLink:
        try:
            link = self._links[address] = await self._connect(address, card, lambda: self._lose(address))
        finally:
            del self._connecting[address]
        await self._close_idle()
        return link

    async def _close_idle(self) -> None:
        """Closes the oldest of the links that no session uses, if there are too many."""
        used = self._used()
        idle = [address for address in self._links if address not in used]
        for link in [self._links.pop(address) for address in idle[: max(0, len(idle) - MAX_IDLE_LINKS)]]:
            await link.close()

    def _lose(self, address: str) -> None:
        self._links.pop(address, None)
        self._on_lost(address)


def retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieves the exception, which nothing else awaits if the opening was given up, or failed for a second reason."""
    if not done.cancelled():
        done.exception()
