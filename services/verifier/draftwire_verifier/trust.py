"""Trust in drafters: whose draft tokens may enter texts, by audit, credit and quarantine."""

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import structlog

from draftwire.audit import AuditSums
from draftwire.audit.first_uses import FirstUses
from draftwire.engine.target_session import Step, StepResult, TargetSession
from draftwire_verifier.drafters import Drafter, DrafterOrigin, Drafters, Greeting

log = structlog.get_logger()

LOCAL_ORIGIN = "verifier"
"""Origin of what drafts inside the verifier, in the records of drafters: no connection has such a name."""


class RoundTrust:
    """Drafters whose blocks the current round of a session may use. Decided when the round begins, before any of its
    tokens is drawn: when a block comes may depend on its tokens.
    """

    def __init__(self, now: float) -> None:
        """Trusts drafters that have proved themselves by now, and nobody else."""
        self._began_at = now
        self._promised: dict[DrafterOrigin, int] = {}
        """Tokens that are kept of credits, 0 of those that had too few: an origin is asked once in a round."""

    def end(self) -> None:
        """Gives back what was kept of credits: the round is over, and what it used was spent."""
        for origin, num_tokens in self._promised.items():
            origin.promise(-num_tokens)

    def add(self, drafter: Drafter, num_tokens: int) -> None:
        """Trusts the unproven drafters of a drafter's origin too, if that has credit for so many tokens."""
        origin = drafter.origin
        if not drafter.is_proven and origin not in self._promised:
            self._promised[origin] = num_tokens if origin.has_credit(num_tokens) else 0
            origin.promise(self._promised[origin])

    def covers(self, drafter: Drafter) -> bool:
        """Whether a drafter's block may be used."""
        has_proved_itself = drafter.is_proven and drafter.proven_at <= self._began_at
        return has_proved_itself or self._promised.get(drafter.origin, 0) > 0


class Trust:
    """Says whose blocks may be used. Used on the event loop."""

    def __init__(self, drafters: Drafters) -> None:
        """Starts without sessions. `drafters` has the records."""
        self.drafters = drafters
        self._first_uses = FirstUses()
        self._local: dict[str, Drafter] = {}
        self._rounds: dict[TargetSession, RoundTrust] = {}
        """Current rounds of the sessions whose text a lie could change, and the audit would see it."""
        self._unaudited: dict[TargetSession, RoundTrust] = {}
        """Rounds that are over, and whose use of credits is not counted yet: they keep what they were promised."""
        self._repeated = WeakSet[TargetSession]()
        """Sessions whose draft tokens do not count: an earlier one drew with the same random numbers."""

    def adopt(self, strategy: str) -> None:
        """Audits what the verifier itself drafts by a strategy, as if a drafter sent it."""
        self._local[strategy] = self.drafters.connect(Greeting(strategy, LOCAL_ORIGIN, 0))

    def may_draft(self, strategy: str) -> bool:
        """Whether what the verifier drafts by a strategy is to be used."""
        return strategy not in self._local or not self._local[strategy].is_quarantined

    def open(self, session: TargetSession) -> None:
        """Begins the first round of a session."""
        parameters = session.spec.parameters
        if not self._first_uses.claim(session.spec.verifying_key, parameters.choice):
            self._repeated.add(session)
        elif session.rule.needs_draft_probs and not parameters.sampling.greedy:
            self._begin(session)

    def close(self, session: TargetSession) -> None:
        """Gives back what the round of a session that is closed would have used."""
        trust = self._rounds.pop(session, None)
        if trust is not None:
            trust.end()

    def begin(self, session: TargetSession) -> None:
        """Decides whose blocks a session's next round may use: its drafter's or, while it has none, those of any. The
        round before is over, and `audit` is called with its step.
        """
        if session in self._rounds:
            self._unaudited[session] = self._rounds[session]
            self._begin(session)

    def _begin(self, session: TargetSession) -> None:
        self._rounds[session] = RoundTrust(self.drafters.now())
        drafter = self.drafters.get(session.drafter_id) if session.drafter_id is not None else None
        self._add(session, self.drafters if drafter is None else (drafter,))

    def welcome(self, drafter: Drafter, sessions: Iterable[TargetSession]) -> None:
        """Lets the rounds use a new drafter's blocks whose sessions wait for one."""
        for session in sessions:
            if session.drafter_id is None:
                self._add(session, (drafter,))

    def _add(self, session: TargetSession, drafters: Iterable[Drafter]) -> None:
        """Trusts drafters in the current round of a session as far as they have proved themselves or have credit."""
        trust = self._rounds.get(session)
        if trust is not None and session.has_speculation:
            num_tokens = session.spec.max_tree_nodes or session.spec.parameters.max_draft_tokens  # of any of its blocks
            for drafter in drafters:
                trust.add(drafter, num_tokens)

    def may_use(self, session: TargetSession, sender: int) -> bool:
        """Whether the tokens of a block for a session's current round may enter the text, as far as its sender is
        trusted.

        Depends on the sender and on what was known when the round began, never on the block: see docs/exactness.md.
        """
        drafter, trust = self.drafters.get(sender), self._rounds.get(session)
        return drafter is not None and (trust is None or trust.covers(drafter))

    def audit(self, step: Step, result: StepResult, audits: Sequence[AuditSums | None]) -> list[Drafter]:
        """Adds the audit sums of a step to the drafters' records; returns those who are newly in quarantine.

        The sessions' next rounds have begun. So a session's unproven drafter needs credit for two rounds.
        """
        sums_of: dict[tuple[int, bool], AuditSums] = {}
        for item, sums in zip(step.items, audits, strict=True):
            if (over := self._unaudited.pop(item.session, None)) is not None:
                over.end()
            block = result.drafted.get(item.session.key) or item.block
            if block is None or sums is None or item.session in self._repeated:
                continue
            local = self._local.get(block.local_strategy)
            sender = (block.drafter_id, block.is_used) if local is None else (local.id, False)  # it needs no credit
            sums_of[sender] = sums_of.get(sender, AuditSums()) + sums
        found = [(self.drafters.get(drafter_id), is_used, sums) for (drafter_id, is_used), sums in sums_of.items()]
        return [one for one, is_used, sums in found if one is not None and _is_found_out(one, sums, is_used=is_used)]


def _is_found_out(drafter: Drafter, sums: AuditSums, *, is_used: bool) -> bool:
    """Adds to a drafter's audit, and returns whether this newly puts it in quarantine."""
    origin, suspicion = drafter.origin, drafter.origin.suspicion
    is_newly_quarantined = drafter.add(sums, is_used=is_used)
    if origin.suspicion is not None and suspicion is None:
        log.warning("verifier.origin_suspected", origin=origin.name, reason=origin.suspicion.message)
    return is_newly_quarantined
