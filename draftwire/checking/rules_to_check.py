"""Finds the rules that a check is about: rules for chains, and rules for trees."""

from collections.abc import Iterable
from typing import cast

from draftwire.options.trees.tree_choice import TREE_RULES
from draftwire.options.trees.tree_rule import TreeRule
from draftwire.verification import RULES
from draftwire.verification.rule import VerificationRule
from draftwire.verification.rule_loading import as_rule, check_attributes, imported


def load_rules(names: Iterable[str]) -> tuple[list[VerificationRule], list[TreeRule]]:
    """Returns rules for chains, and rules for trees; one that decides about both is in both lists.

    The names are of `RULES` and `TREE_RULES`, or import paths; see `load_rule`.

    Raises:
        InvalidRequestError: there is no such rule; the message is one line.
    """
    rules: list[VerificationRule] = []
    tree_rules: list[TreeRule] = []
    known = {**RULES, **TREE_RULES}
    for name in dict.fromkeys(names):
        if name in known:
            rules += [RULES[name]] if name in RULES else []
            tree_rules += [TREE_RULES[name]] if name in TREE_RULES else []
            continue
        found = imported(name, known)
        is_of_trees = callable(getattr(found, "decide_trees", None))
        if is_of_trees:
            check_attributes(name, found)
            tree_rules.append(cast(TreeRule, found))
        if not is_of_trees or callable(getattr(found, "decide", None)):
            rules.append(as_rule(name, found))
    return rules, tree_rules
