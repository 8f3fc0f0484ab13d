"""Audit sums of a step, from the blocks that it decided."""

from collections.abc import Sequence

from draftwire.audit import AuditSums, audit_sums, audit_sums_of_trees
from draftwire.verification.deciding import Decided, DecidedTrees
from draftwire.verification.rule import VerificationRule


def audits_of(
    batches: Sequence[Decided], rules: Sequence[VerificationRule], tree_batches: Sequence[DecidedTrees] = ()
) -> list[AuditSums | None]:
    """Returns the audit sums of each block's draft tokens; None if the block has no distributions.

    Args:
        batches: what was decided; their members are indices of `rules`.
        rules: of all blocks of the step, also of those that were not decided.
        tree_batches: the same as `batches` for token trees.
    """
    audits: list[AuditSums | None] = [None] * len(rules)
    for decided in batches:
        if decided.blocks.has_drafts and rules[decided.members[0]].needs_draft_probs:
            for member, sums in zip(decided.members, audit_sums(decided.blocks), strict=True):
                audits[member] = sums
    for trees in tree_batches:
        for member, sums in zip(trees.members, audit_sums_of_trees(trees.trees), strict=True):
            audits[member] = sums
    return audits
