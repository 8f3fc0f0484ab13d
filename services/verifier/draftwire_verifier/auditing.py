"""Audit sums of a step, from the blocks that it decided."""

from collections.abc import Sequence

from draftwire.audit import AuditSums, audit_sums
from draftwire.verification.deciding import Decided, DecidedShapes
from draftwire.verification.rule import VerificationRule


def audits_of(
    batches: Sequence[Decided], rules: Sequence[VerificationRule], shaped: Sequence[DecidedShapes] = ()
) -> list[AuditSums | None]:
    """Returns the audit sums of each block's draft tokens; None if the block has no distributions.

    Args:
        batches: what was decided; their members are indices of `rules`.
        rules: of all blocks of the step, also of those that were not decided.
        shaped: the same as `batches` for blocks that are no chains.
    """
    audits: list[AuditSums | None] = [None] * len(rules)
    for decided in batches:
        if decided.blocks.has_drafts and rules[decided.members[0]].needs_draft_probs:
            for member, sums in zip(decided.members, audit_sums(decided.blocks), strict=True):
                audits[member] = sums
    for others in shaped:
        for index, member in enumerate(others.members):
            audits[member] = sum(audit_sums(others.blocks.drawn_one_by_one(index)), AuditSums())
    return audits
