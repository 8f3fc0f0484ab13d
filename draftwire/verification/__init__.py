"""Verification rules by name."""

from collections.abc import Iterable
from importlib import import_module

from draftwire.errors import InvalidRequestError
from draftwire.requests.rules import unknown_rule
from draftwire.verification.block import BlockRule
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.coupled import CoupledRule
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
from draftwire.verification.typical import TypicalRule

RULES: dict[str, VerificationRule] = {
    rule.name: rule for rule in (BlockRule(), TokenRule(), CoupledRule(), TypicalRule())
}
"""Built-in rules, the default first."""

OF_TREES = {
    **dict.fromkeys(("TREE_RULES", "tree_rule_for", "tree_rule_named"), "tree_choice"),
    **dict.fromkeys(("TreeLaw", "TreeLawRule", "TreeOutcome", "TreeRule", "verify_trees"), "tree_rule"),
    "TreeBatch": "trees",
}
"""Names that users import from here, and the modules that they are loaded from when they are asked for."""

MOVED_RULES = {
    "greedy_block": "examples.rules.greedy_block:GreedyBlockRule",
    "multi_round": "examples.rules.multi_round:MultiRoundRule",
    "without_replacement": "examples.rules.multi_round:WithoutReplacementRule",
    "k_seq": "examples.rules.k_seq:KSeqRule",
}
"""Places in the repository of rules that were among these before: they are studied, not served."""


def rule_named(name: str) -> VerificationRule:
    """Returns a built-in rule.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    if name not in RULES:
        raise no_such_rule(name, RULES)
    return RULES[name]


new_rule = rule_named
"""The name for runs in one process, kept for users of 0.1."""


def no_such_rule(name: str, known: Iterable[str]) -> InvalidRequestError:
    """Returns the error for a name that is none of the known ones; it says where the rule is now, if it moved."""
    if name in MOVED_RULES:
        return InvalidRequestError(f"{name} is now {MOVED_RULES[name]}, in a clone of the repository")
    return unknown_rule(known)


def __getattr__(name: str) -> object:
    if name in OF_TREES:
        return getattr(import_module(f"draftwire.options.trees.{OF_TREES[name]}"), name)
    places = [place for place in MOVED_RULES.values() if place.endswith(f":{name}")]
    if places:  # no AttributeError, whose text `from draftwire.verification import` would hide
        raise ImportError(f"{name} is now {places[0]}, in a clone of the repository")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "RULES",
    "BlockBatch",
    "FixedNoise",
    "KeyedNoise",
    "LawRule",
    "Noise",
    "Outcome",
    "StopLaw",
    "VerificationRule",
    "new_rule",
    "rule_named",
    "verify",
    *OF_TREES,
]
