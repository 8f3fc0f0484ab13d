"""Chooses the rule that decides about the token trees of a session."""

from draftwire.errors import InvalidRequestError
from draftwire.options.trees.traversal import TraversalRule
from draftwire.options.trees.tree_rule import TreeRule
from draftwire.options.trees.walk import COUPLED_WALK, GREEDY_WALK, walking_rule
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import no_such_rule
from draftwire.verification.block import BlockRule
from draftwire.verification.rule import VerificationRule

TRAVERSAL = TraversalRule()
"""Decides where chains are decided by `block`."""


TREE_RULES: dict[str, TreeRule] = {rule.name: rule for rule in (TRAVERSAL, COUPLED_WALK, GREEDY_WALK)}
"""Rules for trees of draft tokens."""


def tree_rule_named(name: str) -> TreeRule:
    """Returns a rule for trees.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    if name not in TREE_RULES:
        raise no_such_rule(name, TREE_RULES)
    return TREE_RULES[name]


def tree_rule_for(rule: VerificationRule, sampling: SamplingParams) -> TreeRule:
    """Returns the rule that decides about the trees of a session: a walk, or `traversal` in the place of `block`.

    Raises:
        InvalidRequestError: the rule is for chains alone.
    """
    walking = walking_rule(rule, sampling)
    if walking is None and rule.name != BlockRule.name:
        raise InvalidRequestError(f"rejection_sample_method: {rule.name} takes no token trees")
    return walking or TRAVERSAL
