"""Verification rules, by the names that requests use."""

from draftwire.errors import InvalidRequestError
from draftwire.verification.block import BlockRule
from draftwire.verification.rule import BlockBatch, Outcome, StopLaw, VerificationRule, verify
from draftwire.verification.token import TokenRule

RULES: dict[str, VerificationRule] = {rule.name: rule for rule in (BlockRule(), TokenRule())}
"""All rules that a server offers, the default first."""

DEFAULT_RULE = "block"


def rule_named(name: str) -> VerificationRule:
    """Returns a rule.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    if name not in RULES:
        raise InvalidRequestError(f"unknown rejection_sample_method {name!r}; known: {', '.join(RULES)}")
    return RULES[name]


__all__ = [
    "DEFAULT_RULE",
    "RULES",
    "BlockBatch",
    "Outcome",
    "StopLaw",
    "VerificationRule",
    "rule_named",
    "verify",
]
