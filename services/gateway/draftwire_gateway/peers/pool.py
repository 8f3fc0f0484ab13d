"""The verifiers and drafters of one gateway, and which of them serves what."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from draftwire.errors import InvalidRequestError, ModelMismatchError, UnavailableError
from draftwire.models.description import ModelDescription, can_take_over
from draftwire.runtime.channels import check_prompt_fits
from draftwire.runtime.peers import ModelPeer, check_vocabularies
from draftwire_gateway.peers.roster import Roster
from draftwire_gateway.peers.wire import DrafterLink, SessionLink, VerifierLink
from draftwire_gateway.session.ports import TargetPort

POLL_SECONDS = 0.02


class Pool:
    """The peers that there are, connected or not. Of several that could serve, the one with the fewest sessions does.

    The first verifier that answers and offers the default rule decides which model the gateway serves, for as long as
    it lives. Other rules need not be offered by all: a session is opened where its own is.
    """

    def __init__(
        self,
        verifiers: Roster[VerifierLink],
        drafters: Roster[DrafterLink],
        largest_bytes: int,
        near_drafter_sessions: int,
        default_rule: str,
    ) -> None:
        """Prepares; what `maintain` returns does the work.

        Args:
            verifiers: follows where they are.
            drafters: the same of drafters.
            largest_bytes: the largest message that may be sent.
            near_drafter_sessions: how many sessions more a drafter near the verifier may have than one that is not.
            default_rule: the rule that every verifier has to offer.
        """
        self.verifiers = verifiers
        self.drafters = drafters
        self._largest_bytes = largest_bytes
        self._near_drafter_sessions = near_drafter_sessions
        self._default_rule = default_rule
        self.description: ModelDescription
        """The target model; there once `meet` has returned."""
        self._reference: SessionLink[Any, Any] | None = None
        self._met = asyncio.Event()

    @property
    def connected_drafters(self) -> Sequence[DrafterLink]:
        """Those that sessions can be opened on now."""
        return self.drafters.connected

    def targets(self) -> Sequence[TargetPort]:
        """Returns the connected verifiers, those with the fewest sessions first, and those that rest last."""
        return sorted(self.verifiers.connected, key=lambda verifier: (verifier.is_resting, verifier.num_sessions))

    def drafter_for(self, target: TargetPort, but: Collection[int]) -> DrafterLink | None:
        """Returns the drafter with the fewest sessions, one that rests last.

        One in another zone than the verifier counts as if it had some sessions more.
        """
        usable = [
            drafter
            for drafter in self.drafters.connected
            if drafter.instance_id not in but and target.takes_blocks_of(drafter.instance_id)
        ]

        def load(drafter: DrafterLink) -> tuple[bool, int, bool]:
            is_far = None not in (drafter.zone, target.zone) and drafter.zone != target.zone
            return drafter.is_resting, drafter.num_sessions + is_far * self._near_drafter_sessions, is_far

        return min(usable, key=load, default=None)

    def maintain(self) -> list[Coroutine[Any, Any, None]]:
        """Returns what finds the peers and keeps the links to them open, to be run for ever."""
        return [self.verifiers.run(self._check), self.drafters.run(self._check)]

    async def meet(self, timeout_s: float) -> ModelPeer:
        """Waits for the first verifier to answer, and returns it as a model server.

        Raises:
            UnavailableError: none did in time.
            ModelMismatchError: none speaks this version of the protocol.
            InvalidRequestError: a prompt as long as the context would not fit into a message.
        """
        await self._wait(self.verifiers, timeout_s, self._met.is_set)
        assert self._reference is not None, "the first verifier was met"
        return self._reference.peer

    async def wait_connected(self, timeout_s: float) -> None:
        """Waits for one verifier and, if drafters are known, for one of them.

        Raises:
            ModelMismatchError: those that are there serve other models than are wanted.
            InvalidRequestError: a prompt as long as the context would not fit into a message.
            UnavailableError: none came up in time.
        """
        await self._wait(self.verifiers, timeout_s, lambda: bool(self.verifiers.connected))
        drafters = self.drafters
        await self._wait(drafters, timeout_s, lambda: bool(drafters.connected) or not drafters.links)

    async def _wait(
        self, roster: Roster[VerifierLink] | Roster[DrafterLink], timeout_s: float, is_done: Callable[[], bool]
    ) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not is_done():
            if roster.fault is not None:
                raise roster.fault
            if asyncio.get_running_loop().time() > deadline:
                raise UnavailableError(f"no {roster.role} at {roster.where} came up within {timeout_s:g} s")
            await asyncio.sleep(POLL_SECONDS)

    async def _check(self, link: SessionLink[Any, Any], model: ModelDescription) -> None:
        """Raises why a service cannot be used."""
        check_prompt_fits(model, self._largest_bytes)
        if isinstance(link, DrafterLink):
            await self._met.wait()
            await self._check_drafter(link, model)
            return
        rule = model.rule_named(self._default_rule)
        if not rule.is_lossless:
            raise InvalidRequestError(f"{rule.name} is lossy: requests may ask for it, but it cannot be the default")
        if self._reference is None:
            self.description, self._reference = model, link
            self._met.set()
        elif not can_take_over(self.description, model):
            raise ModelMismatchError(
                f"{link.address} serves {model.name} ({model.dtype}), which is not the model that this gateway serves,"
                f" {self.description.name} ({self.description.dtype}): weights, numerics, vocabulary and context must"
                " be the same"
            )

    async def _check_drafter(self, link: DrafterLink, model: ModelDescription) -> None:
        if model.vocabulary_fingerprint == self.description.vocabulary_fingerprint:
            return
        links = self.verifiers.links
        for verifier in [*self.verifiers.connected, *(known for known in links if known is self._reference)][:1]:
            await check_vocabularies(verifier.peer, link.peer)  # names the first differing token
        raise ModelMismatchError(f"the vocabulary of {link.address} is not that of {self.description.name}")
