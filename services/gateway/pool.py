"""The verifiers and drafters of one gateway, and which of them serves what."""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from draftwire.errors import ModelMismatchError, UnavailableError
from draftwire.models.description import ModelDescription, can_take_over
from draftwire.services.gateway.ports import TargetPort
from draftwire.services.gateway.wire import DrafterLink, SessionLink, VerifierLink
from draftwire.services.rpc.channels import check_prompt_fits
from draftwire.services.rpc.peers import ModelPeer, check_vocabularies

POLL_SECONDS = 0.02


class Pool:
    """The peers that there are, connected or not. Of several that could serve, the one with the fewest sessions does.

    The first verifier that answers decides which model the gateway serves, for as long as it lives.
    """

    def __init__(self, verifiers: Sequence[VerifierLink], drafters: Sequence[DrafterLink], largest_bytes: int) -> None:
        """Takes links that are not open yet; `largest_bytes` is the largest message that may be sent."""
        self.verifiers = verifiers
        self.drafters = drafters
        self._largest_bytes = largest_bytes
        self.description: ModelDescription
        """The target model; there from `open` on."""
        self._reference: VerifierLink

    @property
    def connected_drafters(self) -> list[DrafterLink]:
        """Those that sessions can be opened on now."""
        return [drafter for drafter in self.drafters if drafter.connected]

    def targets(self) -> Sequence[TargetPort]:
        """See `Peers.targets`."""
        connected = [verifier for verifier in self.verifiers if verifier.connected]
        return sorted(connected, key=lambda verifier: (verifier.is_resting, verifier.num_sessions))

    def drafter_for(self, target: TargetPort, but: Collection[int]) -> DrafterLink | None:
        """See `Peers.drafter_for`."""
        usable = [
            drafter
            for drafter in self.connected_drafters
            if drafter.instance_id not in but and target.takes_blocks_of(drafter.instance_id)
        ]
        return min(usable, key=lambda drafter: (drafter.is_resting, drafter.num_sessions), default=None)

    async def meet(self, timeout_s: float) -> ModelPeer:
        """Waits for the first verifier to answer, and returns it as a model server.

        Raises:
            UnavailableError: none did in time.
            ModelMismatchError: none speaks this version of the protocol.
        """
        asked = {asyncio.create_task(_describe(link.peer)): link for link in self.verifiers}
        waiting = set(asked)
        faults: list[BaseException] = []
        try:
            async with asyncio.timeout(timeout_s):
                while waiting:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        fault = task.exception()
                        if fault is None:
                            self.description, self._reference = task.result(), asked[task]
                            return self._reference.peer
                        faults.append(fault)
        except TimeoutError:
            raise UnavailableError(f"no verifier at {_names(self.verifiers)} came up within {timeout_s:g} s") from None
        finally:
            for task in asked:
                task.cancel()
        raise faults[0]

    def maintain(self) -> list[Coroutine[Any, Any, None]]:
        """Returns what keeps the links open, to be run for ever."""
        links: list[SessionLink[Any, Any]] = [*self.verifiers, *self.drafters]
        return [link.maintain(self._check) for link in links]

    async def wait_connected(self, timeout_s: float) -> None:
        """Waits for one verifier and, if there are to be drafters, for one of them.

        Raises:
            ModelMismatchError: those that are there serve other models than are wanted.
            InvalidRequestError: a prompt as long as the context would not fit into a message.
            UnavailableError: none came up in time.
        """
        for kind, links in (("verifier", self.verifiers), ("drafter", self.drafters)):
            deadline = asyncio.get_running_loop().time() + timeout_s
            while links and not any(link.connected for link in links):
                faults = [link.fault for link in links]
                if all(faults) and faults[0] is not None:
                    raise faults[0]
                if asyncio.get_running_loop().time() > deadline:
                    raise UnavailableError(f"no {kind} at {_names(links)} came up within {timeout_s:g} s")
                await asyncio.sleep(POLL_SECONDS)

    async def _check(self, link: SessionLink[Any, Any], model: ModelDescription) -> None:
        """Raises why a service cannot be used."""
        check_prompt_fits(model, self._largest_bytes)
        if isinstance(link, DrafterLink):
            if model.vocabulary_fingerprint != self.description.vocabulary_fingerprint:
                await check_vocabularies(self._reference.peer, link.peer)  # names the first differing token
                raise ModelMismatchError(f"the vocabulary of {link.address} is not that of {self.description.name}")
        elif not can_take_over(self.description, model):
            raise ModelMismatchError(
                f"{link.address} serves {model.name} ({model.dtype}), which is not the model that this gateway serves,"
                f" {self.description.name} ({self.description.dtype}): weights, numerics, vocabulary and context must"
                " be the same"
            )


async def _describe(peer: ModelPeer) -> ModelDescription:
    """Asks for the model until it is loaded."""
    while True:
        try:
            return await peer.describe()
        except UnavailableError:
            await asyncio.sleep(POLL_SECONDS)


def _names(links: Sequence[SessionLink[Any, Any]]) -> str:
    return ", ".join(link.address for link in links)
