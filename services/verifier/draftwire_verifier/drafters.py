"""The drafters that send blocks to this verifier, and what the audit knows of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from draftwire.audit import AuditSums, DrafterAudit

MAX_DRAFTERS = 1024
"""Drafters that are remembered; of more, those that are not connected are forgotten: first the honest, then by age."""


@dataclass(slots=True)
class Drafter:
    """One drafter process. It keeps its record when its stream breaks and comes back."""

    id: int
    """Chosen at random by the process when it started."""
    model_name: str
    audit: DrafterAudit = field(default_factory=DrafterAudit)
    num_streams: int = 0

    @property
    def is_quarantined(self) -> bool:
        """Whether its tokens are not drawn from what it sends."""
        return self.audit.alarm is not None

    def add(self, sums: AuditSums) -> bool:
        """Adds to the audit and returns whether this puts the drafter in quarantine."""
        was_quarantined = self.is_quarantined
        self.audit.add(sums)
        return self.is_quarantined and not was_quarantined


class Drafters:
    """All drafters that said hello, the latest last."""

    def __init__(self) -> None:
        self._by_id: dict[int, Drafter] = {}

    def __iter__(self) -> Iterator[Drafter]:
        """Iterates over those of now. On any thread."""
        return iter(list(self._by_id.values()))

    def get(self, drafter_id: int) -> Drafter | None:
        """Returns a drafter that is known."""
        return self._by_id.get(drafter_id)

    def connect(self, drafter_id: int, model_name: str) -> Drafter:
        """Returns a drafter whose stream has just begun."""
        drafter = self._by_id.pop(drafter_id, None) or Drafter(drafter_id, model_name)
        self._by_id[drafter_id] = drafter
        drafter.num_streams += 1
        gone = sorted((other for other in self if not other.num_streams), key=lambda other: other.is_quarantined)
        for other in gone[: max(0, len(self._by_id) - MAX_DRAFTERS)]:
            del self._by_id[other.id]
        return drafter
