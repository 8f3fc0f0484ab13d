"""Verification rules by name."""

from draftwire.requests.rules import unknown_rule
from draftwire.verification.block import BlockRule
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.coupled import CoupledRule
from draftwire.verification.greedy_block import GreedyBlockRule
from draftwire.verification.k_seq import KSeqRule
from draftwire.verification.multi_round import MultiRoundRule, WithoutReplacementRule
from draftwire.verification.rule import (
    FixedNoise,
    KeyedNoise,
    LawRule,
    Noise,
    Outcome,
    StopLaw,
    VerificationRule,
    verify,
)
from draftwire.verification.token import TokenRule
from draftwire.verification.tree_choice import TRAVERSAL, tree_rule_for
from draftwire.verification.tree_rule import TreeLaw, TreeLawRule, TreeOutcome, TreeRule, verify_trees
from draftwire.verification.trees import TreeBatch
from draftwire.verification.typical import TypicalRule
from draftwire.verification.walk import TargetOnlyRule

RULES: dict[str, VerificationRule] = {
    rule.name: rule for rule in (BlockRule(), TokenRule(), CoupledRule(), TypicalRule())
}
"""Built-in rules, the default first."""


TREE_RULES: dict[str, TreeRule] = {
    rule.name: rule
    for rule in (
        TRAVERSAL,
        CoupledRule(),
        TargetOnlyRule(),
        MultiRoundRule(),
        WithoutReplacementRule(),
        KSeqRule(),
    )
}
"""Rules for trees of draft tokens; the last three for study."""


def rule_named(name: str) -> VerificationRule:
    """Returns a built-in rule.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    if name not in RULES:
        raise unknown_rule(RULES)
    return RULES[name]


def tree_rule_named(name: str) -> TreeRule:
    """Returns a rule for trees.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    if name not in TREE_RULES:
        raise unknown_rule(TREE_RULES)
    return TREE_RULES[name]


def new_rule(name: str) -> VerificationRule:
    """Returns a rule for one run in one process, which also supports the stateful `greedy_block`.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    return GreedyBlockRule() if name == GreedyBlockRule.name else rule_named(name)


__all__ = [
    "RULES",
    "TREE_RULES",
    "BlockBatch",
    "FixedNoise",
    "GreedyBlockRule",
    "KeyedNoise",
    "LawRule",
    "Noise",
    "Outcome",
    "StopLaw",
    "TreeBatch",
    "TreeLaw",
    "TreeLawRule",
    "TreeOutcome",
    "TreeRule",
    "VerificationRule",
    "new_rule",
    "rule_named",
    "tree_rule_for",
    "tree_rule_named",
    "verify",
    "verify_trees",
]
