"""Records of the drafters that send blocks to this verifier, with their audits."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from draftwire.audit import AuditSums, DrafterAudit

MAX_DRAFTERS = 1024
"""Most records. Beyond it, disconnected drafters are evicted: those not in quarantine first, oldest first."""


@dataclass(slots=True)
class Drafter:
    """Record of one drafter process. It outlives the drafter's streams."""

    id: int
    """Chosen at random by the process when it started."""
    model_name: str
    audit: DrafterAudit = field(default_factory=DrafterAudit)
    num_streams: int = 0
    """Open streams of the drafter."""

    @property
    def is_quarantined(self) -> bool:
        """Whether the audit found that its tokens are not drawn from the distributions that it sends."""
        return self.audit.alarm is not None

    def add(self, sums: AuditSums) -> bool:
        """Adds to the audit and returns whether this newly puts the drafter in quarantine."""
        was_quarantined = self.is_quarantined
        self.audit.add(sums)
        return self.is_quarantined and not was_quarantined


class Drafters:
    """Records of the drafters that have connected, the latest last."""

    def __init__(self) -> None:
        self._by_id: dict[int, Drafter] = {}

    def __iter__(self) -> Iterator[Drafter]:
        """Iterates over a snapshot. Thread-safe."""
        return iter(list(self._by_id.values()))

    def get(self, drafter_id: int) -> Drafter | None:
        """Returns the record of a drafter; None if there is none."""
        return self._by_id.get(drafter_id)

    def connect(self, drafter_id: int, model_name: str) -> Drafter:
        """Returns the record of a drafter, made if new, and counts a new stream."""
        drafter = self._by_id.pop(drafter_id, None) or Drafter(drafter_id, model_name)
        self._by_id[drafter_id] = drafter
        drafter.num_streams += 1
        gone = sorted((other for other in self if not other.num_streams), key=lambda other: other.is_quarantined)
        for other in gone[: max(0, len(self._by_id) - MAX_DRAFTERS)]:
            del self._by_id[other.id]
        return drafter
