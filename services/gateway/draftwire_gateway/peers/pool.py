"""The verifiers and drafters of one gateway, and their selection for sessions."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from draftwire.errors import InvalidRequestError, ModelMismatchError, UnavailableError
from draftwire.models.description import ModelDescription, can_take_over
from draftwire.runtime.channels import check_prompt_fits
from draftwire.runtime.peers import ModelPeer, check_vocabularies
from draftwire_gateway.peers.roster import Roster
from draftwire_gateway.peers.wire import DrafterLink, SessionLink, VerifierLink
from draftwire_gateway.session.ports import TargetPort

log = structlog.get_logger()

POLL_SECONDS = 0.02
WATCH_SECONDS = 0.1
"""Interval of looking whether a verifier can take sessions."""


@dataclass(slots=True, eq=False)
class Pool:
    """All known peers, connected or not. Of the eligible ones, the peer with the fewest sessions is selected.

    The first verifier that answers and offers the default rule determines the model of the gateway until it restarts.
    Verifiers may differ in their other rules: a session is opened on one that offers its rule.
    """

    verifiers: Roster[VerifierLink]
    drafters: Roster[DrafterLink]
    _largest_bytes: int
    _near_drafter_sessions: int
    _default_rule: str
    """Verifiers without it are refused."""
    _wanted_drafts: Sequence[str] = ()
    """Strategies by which verifiers are to draft by themselves; those that lack some are logged."""
    description: ModelDescription = field(init=False)
    """The target model; set when `meet` has returned."""
    _reference: SessionLink[Any, Any] | None = None
    _met: asyncio.Event = field(default_factory=asyncio.Event)
    _draft_models: dict[str, None] = field(default_factory=dict)
    _last_usable_at: float = float("-inf")

    def targets(self) -> Sequence[TargetPort]:
        """Returns the connected verifiers that answer, by number of sessions; those that cool down come last."""
        usable = [verifier for verifier in self.verifiers.connected if verifier.is_well]
        return sorted(usable, key=lambda verifier: (verifier.is_cooling_down, verifier.num_sessions))

    def why_no_target(self) -> str:
        """Returns why no verifier can take sessions now; empty if one can. Readiness is this, and errors say it."""
        connected = self.verifiers.connected
        if any(verifier.is_well for verifier in connected):
            return ""
        if not connected:
            return "no verifier can be reached"
        return "no verifier answers" if all(one.is_silent for one in connected) else "no verifier takes sessions"

    def last_usable_at(self) -> float:
        """Returns when a verifier could last take sessions, in the loop's time: now, if one can."""
        if not self.why_no_target():
            self._last_usable_at = asyncio.get_running_loop().time()
        return self._last_usable_at

    def draft_models(self) -> Collection[str]:
        """Returns the names of the draft models, of drafters that were ever connected."""
        return self._draft_models.keys()

    def drafters_for(self, target: TargetPort, but: Collection[int]) -> Sequence[DrafterLink]:
        """Returns the drafters by number of sessions, the fewest first; those that cool down come last.

        A drafter in another zone than the verifier counts as if it had `near_drafter_sessions` more.
        """
        usable = [
            drafter
            for drafter in self.drafters.connected
            if drafter.instance_id not in but and target.takes_blocks_of(drafter.known_as(target.address))
        ]

        def load(drafter: DrafterLink) -> tuple[bool, int, bool]:
            is_far = None not in (drafter.zone, target.zone) and drafter.zone != target.zone
            return drafter.is_cooling_down, drafter.num_sessions + is_far * self._near_drafter_sessions, is_far

        return sorted(usable, key=load)

    def maintain(self) -> list[Coroutine[Any, Any, None]]:
        """Returns coroutines that discover the peers and keep the links open, to be run for ever."""
        return [self.verifiers.run(self._check), self.drafters.run(self._check), self._watch()]

    async def _watch(self) -> None:
        """Notes when a verifier could take sessions, also while nobody asks for one."""
        while True:
            self.last_usable_at()
            await asyncio.sleep(WATCH_SECONDS)

    async def meet(self, timeout_s: float) -> ModelPeer:
        """Waits for the first usable verifier, and returns it as a model server.

        Raises:
            UnavailableError: no verifier answered in time.
            ModelMismatchError: no verifier has this version of the protocol.
            InvalidRequestError: a prompt as long as the context would not fit into a message.
        """
        await self._wait(self.verifiers, timeout_s, self._met.is_set)
        assert self._reference is not None, "the first verifier was met"
        return self._reference.peer

    async def wait_connected(self, timeout_s: float) -> None:
        """Waits for one connected verifier and, if drafters are known, one connected drafter.

        Raises:
            ModelMismatchError: the peers serve other models.
            InvalidRequestError: a prompt as long as the context would not fit into a message.
            UnavailableError: no peer became ready in time.
        """
        await self._wait(self.verifiers, timeout_s, lambda: bool(self.verifiers.connected))
        await self._wait(self.drafters, timeout_s, lambda: bool(self.drafters.connected) or not self.drafters.links)

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
        check_prompt_fits(model, self._largest_bytes)
        if isinstance(link, DrafterLink):
            await self._met.wait()
            await self._check_drafter(link, model)
            return
        rule = model.rule_named(self._default_rule)
        if not rule.is_lossless:
            raise InvalidRequestError(f"{rule.name} is lossy: requests may ask for it, but it cannot be the default")
        missing = [strategy for strategy in self._wanted_drafts if strategy not in model.local_strategies]
        if missing:
            log.warning("gateway.local_drafts_missing", address=link.address, missing=missing)
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
            self._draft_models[model.name] = None
            return
        known = [link for link in self.verifiers.links if link is self._reference]
        for verifier in [*self.verifiers.connected, *known][:1]:
            await check_vocabularies(verifier.peer, link.peer)  # names the first differing token
        raise ModelMismatchError(f"the vocabulary of {link.address} is not that of {self.description.name}")
