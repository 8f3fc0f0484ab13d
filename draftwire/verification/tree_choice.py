"""Which rule decides about the token trees of a session."""

from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.block import BlockRule
from draftwire.verification.rule import UndraftedRule, VerificationRule
from draftwire.verification.traversal import TraversalRule
from draftwire.verification.tree_rule import TreeRule, UndraftedTreeRule
from draftwire.verification.walk import walking_rule

TRAVERSAL = TraversalRule()
"""Decides where chains are decided by `block`."""
_undrafted: dict[int, UndraftedTreeRule] = {}
"""By the id of the rule that each wraps and so keeps: those that decide together are told apart by identity."""


def tree_rule_for(rule: VerificationRule, sampling: SamplingParams) -> TreeRule:
    """Returns the rule that decides about the trees of a session: a walk, or `traversal` in the place of `block`.

    Args:
        rule: of the session, or an `UndraftedRule` of it.
        sampling: of the target.

    Raises:
        InvalidRequestError: the rule is for chains alone.
    """
    judging = rule.rule if isinstance(rule, UndraftedRule) else rule
    walking = walking_rule(judging, sampling)
    if walking is None and judging.name != BlockRule.name:
        raise InvalidRequestError(f"rejection_sample_method: {rule.name} takes no token trees")
    tree_rule = walking or TRAVERSAL
    return tree_rule if judging is rule else _undrafted.setdefault(id(tree_rule), UndraftedTreeRule(tree_rule))
