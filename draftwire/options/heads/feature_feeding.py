"""Features for the sessions of a drafter with a head: what to ask their verifiers for, and which blocks wait for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from draftwire.drafting.strategy import DraftingStrategy, DraftSequence
from draftwire.engine.draft_session import DraftOption, DraftSession
from draftwire.engine.leases import SessionKey
from draftwire.errors import ProtocolViolationError
from draftwire.options.heads.features import FeatureNeed, FeatureRequest, SessionFeatures


@runtime_checkable
class FedStrategy(DraftingStrategy, Protocol):
    """A strategy that drafts from features of the target, which it is fed with."""

    @property
    def need(self) -> FeatureNeed:
        """The features that it reads, and how they come."""

    def feed(self, sequence: Any, features: SessionFeatures) -> None:
        """Adds features, of the sizes that `need` states, to a sequence of this strategy, in the order of the text. It
        drafts once those of all committed tokens but the last are there.
        """

    def rehearse(self, sequence: Any) -> None:
        """Feeds a sequence of this strategy with features that stand for any."""


@dataclass(slots=True)
class Fed:
    """The features that a session was fed with."""

    stop: int
    """Position behind the last ones."""
    limit: int
    """Position behind the last ones that were asked for."""


class FeatureFeeding(DraftOption):
    """Feeds a strategy. Used on the event loop, but for `feed` and `rehearse`, which are for the torch thread."""

    def __init__(self, strategy: FedStrategy, sequences: Mapping[SessionKey, DraftSequence]) -> None:
        """Starts without sessions; `sequences` are the strategy's, of the open ones."""
        self.need = strategy.need
        self._strategy, self._sequences = strategy, sequences
        self._fed: dict[SessionKey, Fed] = {}

    def may_draft(self, session: DraftSession) -> bool:
        """Whether the features of all committed tokens but the last have come. Of one token alone there is nothing to
        draft from: a head reads a token with the features of the one before.
        """
        fed, last = self._fed.get(session.key), len(session.committed) - 1
        return fed is not None and fed.stop >= last >= 1

    def wanted(self, session: DraftSession) -> FeatureRequest | None:
        """Returns what to ask the verifier for, so that a session can be drafted for, now and in coming rounds; None if
        nothing.

        To be called when a session was calibrated: who is not asked for blocks asks for no features.
        """
        if session.permit is None or session.is_reading:
            return None
        window, last, first = self.need.window, len(session.committed) - 1, None
        fed = self._fed.get(session.key)
        if fed is None or last - fed.stop > window:
            first = max(0, last - window)
            fed = self._fed[session.key] = Fed(first, first)
        if fed.limit - last > window // 2:
            return None
        fed.limit = last + window
        return FeatureRequest(*session.key, session.permit, fed.limit, first)

    def take(self, session: DraftSession, features: SessionFeatures) -> bool:
        """Takes note of a session's features that came, for which its block may have waited.

        Returns:
            Whether some of them are new: they are for `feed` then.

        Raises:
            ProtocolViolationError: they were not asked for, or have other sizes. The session must be closed.
        """
        fed = self._fed.get(session.key)
        if fed is None or not self.need.fits(features):
            raise ProtocolViolationError("features that were not asked for, or of another size")
        if features.stop <= fed.stop:  # sent before they were asked for from another place on
            return False
        if features.first_position > fed.stop or features.stop > fed.limit:
            raise ProtocolViolationError("features of other positions than were asked for")
        fed.stop = features.stop
        return True

    def closed(self, session: DraftSession) -> None:
        """Forgets a session."""
        self._fed.pop(session.key, None)

    def feed(self, key: SessionKey, features: SessionFeatures) -> None:
        """Adds features to a session's sequence, unless it was closed meanwhile."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._strategy.feed(sequence, features)

    def rehearse(self, sequence: DraftSequence) -> None:
        """Feeds a sequence with features that stand for any."""
        self._strategy.rehearse(sequence)
