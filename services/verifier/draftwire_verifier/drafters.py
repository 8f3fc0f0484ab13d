"""Records of the drafters that send blocks to this verifier: identities, audits, and how far each is trusted.

What a drafter says of itself proves nothing. It is known by the identity that it was given here; whoever shows none is
new, and until the audit has seen enough of it, it draws on the credit that it shares with all others of its origin. See
docs/decisions/0017-identities-are-issued-by-the-verifier.md.
"""

import hmac
import math
import secrets
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from draftwire.audit import AuditSums
from draftwire.audit.sequential import Alarm, DrafterAudit
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import DrafterIdentity

MAX_DRAFTERS = 1024
"""Most records. Beyond it, disconnected drafters are evicted: those not in quarantine and not proven first, oldest
first."""

MAX_ORIGINS = 1024
"""Most origins that are remembered without a record of one of their drafters. Beyond it, those that are not suspected
are forgotten first, oldest first."""

PROVEN_TOKENS = 1024
"""Draft tokens with a choice that the audit has to see of a drafter before it is trusted by itself. Those that draw
something else than they declare are mostly found before (docs/audit.md)."""

CREDIT_TOKENS = 2048
"""Draft tokens with a choice that may be used of all unproven drafters of one origin together."""

ORIGIN_WINDOW = 256
"""Draft tokens of the windows in which those of an origin are audited: many drafters may have been honest before."""

REFILL_S = 3600.0
"""Seconds in which a credit that is spent is full again."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """Fields of a drafter's hello when its stream opens, and their origin."""

    model_name: str
    origin: str
    """The certificate or host of its connection."""
    instance_id: int
    """Chosen by the drafter: distinguishes those of an origin that keep no identity, and nothing else."""
    identity: DrafterIdentity | None = None
    """The one that it shows, if it shows one."""
    keeps_identity: bool = True
    """Whether it will show the identity that it is given; drafters of the previous version do not."""


class DrafterOrigin:
    """A certificate, or a host whose drafters show none: what its drafters share until they have proved themselves.

    Attributes:
        audit: of the tokens that were used of its unproven drafters, as if they were those of one. It finds a lie that
            is spread over many identities as soon as that of a single one.
        suspicion: why it gets no more credit: the alarm of this audit, or of one of its drafters'.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        """Starts with a full credit. `clock` counts seconds."""
        self.name = name
        self.audit = DrafterAudit(window=ORIGIN_WINDOW)
        self.suspicion: Alarm | None = None
        self.clock = clock
        self._spent = 0.0
        self._spent_at = clock()
        self._num_promised = 0

    def has_credit(self, num_tokens: int) -> bool:
        """Whether so many more draft tokens of its unproven drafters may be used."""
        self._refill()
        return self.suspicion is None and self._spent + self._num_promised + num_tokens <= CREDIT_TOKENS

    def promise(self, num_tokens: int) -> None:
        """Keeps a part of the credit for a round that has begun; or, with a negative number, gives it back."""
        self._num_promised += num_tokens

    def spend(self, sums: AuditSums) -> None:
        """Counts draft tokens of an unproven drafter that were used."""
        self._refill()
        self._spent += sums.num_positions
        self.audit.add(sums)
        self.suspect(self.audit.alarm)

    def suspect(self, alarm: Alarm | None) -> None:
        """Ends the credit, if there is an alarm."""
        self.suspicion = self.suspicion or alarm

    def give_back(self, num_tokens: int) -> None:
        """Returns what a drafter took that has proved itself."""
        self._refill()
        self._spent = max(0.0, self._spent - num_tokens)

    def _refill(self) -> None:
        now = self.clock()
        self._spent = max(0.0, self._spent - (now - self._spent_at) * CREDIT_TOKENS / REFILL_S)
        self._spent_at = now


@dataclass(slots=True)
class Drafter:
    """Record of one drafter process. It outlives the drafter's streams."""

    identity: DrafterIdentity
    model_name: str
    origin: DrafterOrigin
    lineage: tuple[str, int] | None = None
    """Origin and instance id of a drafter that keeps no identity; None of one that does."""
    audit: DrafterAudit = field(default_factory=DrafterAudit)
    num_streams: int = 0
    """Open streams of the drafter."""
    num_lent: int = 0
    """Tokens that it took of its origin's credit."""
    proven_at: float = math.inf
    """Time at which it had proved itself, by its origin's clock."""
    is_refusal_logged: bool = False
    """Whether a block without a permit was logged since its last stream was opened."""

    @property
    def id(self) -> int:
        """Chosen at random by this verifier."""
        return self.identity.drafter_id

    @property
    def is_quarantined(self) -> bool:
        """Whether the audit found that its tokens are not drawn from the distributions that it sends."""
        return self.audit.alarm is not None

    @property
    def is_proven(self) -> bool:
        """Whether the audit has seen enough of it and found nothing."""
        return not self.is_quarantined and self.audit.total.num_positions >= PROVEN_TOKENS

    def add(self, sums: AuditSums, *, is_used: bool = True) -> bool:
        """Adds to the audit and returns whether this newly puts the drafter in quarantine.

        Args:
            sums: of one or more of its blocks.
            is_used: whether their tokens could enter the text, so that an unproven drafter has to pay for them.
        """
        was_quarantined, was_proven = self.is_quarantined, self.is_proven
        self.audit.add(sums)
        self.origin.suspect(self.audit.alarm)
        if is_used and not was_proven:
            self.origin.spend(sums)
            self.num_lent += sums.num_positions
        if self.is_proven and not was_proven:
            self.origin.give_back(self.num_lent)
            self.num_lent, self.proven_at = 0, self.origin.clock()
        return self.is_quarantined and not was_quarantined


class Drafters:
    """Records of the drafters that have connected, the latest last."""

    def __init__(
        self,
        new_id: Callable[[], int] = lambda: secrets.randbits(64),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without records. `new_id` makes identities that nobody can guess or repeat; `clock` counts seconds."""
        self._new_id = new_id
        self._clock = clock
        self._by_id: dict[int, Drafter] = {}
        self._by_lineage: dict[tuple[str, int], Drafter] = {}
        self._origins = WeakValueDictionary[str, DrafterOrigin]()
        self._left: dict[str, DrafterOrigin] = {}
        """Origins of forgotten drafters, so that nobody gets new credit by having records evicted. The latest last."""

    def __iter__(self) -> Iterator[Drafter]:
        """Iterates over a snapshot. Thread-safe."""
        return iter(list(self._by_id.values()))

    def now(self) -> float:
        """Returns the time, seconds."""
        return self._clock()

    def get(self, drafter_id: int) -> Drafter | None:
        """Returns the record of a drafter; None if there is none."""
        return self._by_id.get(drafter_id)

    def may_log_refusal(self, drafter_id: int) -> bool:
        """Whether a block without a permit is the first of a drafter's stream, which is to be logged."""
        drafter = self.get(drafter_id)
        if drafter is None or drafter.is_refusal_logged:
            return False
        drafter.is_refusal_logged = True
        return True

    def connect(self, greeting: Greeting, in_use: Container[int | None] = ()) -> Drafter:
        """Returns the record of a drafter, made if it is new, and counts a new stream.

        Args:
            greeting: of the drafter.
            in_use: ids of drafters that sessions have: what they sent is still to be audited.
        """
        drafter = self._known(greeting) or self._make(greeting)
        self._by_id.pop(drafter.id, None)
        self._by_id[drafter.id] = drafter
        if drafter.lineage is not None:
            self._by_lineage[drafter.lineage] = drafter
        drafter.num_streams += 1
        drafter.is_refusal_logged = False
        self._evict(in_use)
        return drafter

    def _known(self, greeting: Greeting) -> Drafter | None:
        """Returns the record of a drafter that has connected before; None if it cannot show that it has."""
        if not greeting.keeps_identity:
            return self._by_lineage.get((greeting.origin, greeting.instance_id))
        if greeting.identity is None:
            return None
        drafter = self._by_id.get(greeting.identity.drafter_id)
        if drafter is None or not hmac.compare_digest(drafter.identity.token, greeting.identity.token):
            return None
        return drafter

    def _make(self, greeting: Greeting) -> Drafter:
        origin = self._origins.get(greeting.origin)
        if origin is None:
            origin = self._origins[greeting.origin] = DrafterOrigin(greeting.origin, self._clock)
        identity = DrafterIdentity(self._new_id(), secrets.token_bytes(KEY_BYTES))
        lineage = None if greeting.keeps_identity else (greeting.origin, greeting.instance_id)
        return Drafter(identity, greeting.model_name, origin, lineage)

    def _evict(self, in_use: Container[int | None]) -> None:
        for is_kept_longer in (False, True):
            for drafter in self:
                if len(self._by_id) <= MAX_DRAFTERS:
                    return
                is_idle = not drafter.num_streams and drafter.id not in in_use
                if is_idle and (drafter.is_quarantined or drafter.is_proven) is is_kept_longer:
                    self._forget(drafter)

    def _forget(self, drafter: Drafter) -> None:
        del self._by_id[drafter.id]
        if drafter.lineage is not None:
            del self._by_lineage[drafter.lineage]
        origin = self._left.pop(drafter.origin.name, drafter.origin)
        self._left[origin.name] = origin
        if len(self._left) > MAX_ORIGINS:
            unsuspected = (name for name, one in self._left.items() if one.suspicion is None)
            del self._left[next(unsuspected, next(iter(self._left)))]
