"""Verification rules by name."""

from draftwire.requests.rules import unknown_rule
from draftwire.verification.block import BlockRule
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.coupled import CoupledRule
from draftwire.verification.greedy_block import GreedyBlockRule
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


def rule_named(name: str) -> VerificationRule:
    """Returns a built-in rule.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    if name not in RULES:
        raise unknown_rule(RULES)
    return RULES[name]


def new_rule(name: str) -> VerificationRule:
    """Returns a rule for one run in one process, which also supports the stateful `greedy_block`.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    return GreedyBlockRule() if name == GreedyBlockRule.name else rule_named(name)


__all__ = [
    "RULES",
    "BlockBatch",
    "FixedNoise",
    "GreedyBlockRule",
    "KeyedNoise",
    "LawRule",
    "Noise",
    "Outcome",
    "StopLaw",
    "VerificationRule",
    "new_rule",
    "rule_named",
    "verify",
]
