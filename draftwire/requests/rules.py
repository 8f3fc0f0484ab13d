"""Properties of verification rules that verifiers advertise, without their code: no torch here."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from draftwire.errors import InvalidRequestError

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Allowed names of rules."""


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """Declared properties of a rule; see `draftwire.verification.rule.VerificationRule`.

    Raises:
        InvalidRequestError: the name is not valid.
    """

    name: str
    is_lossless: bool = True
    """Whether the text is distributed as the target's."""
    needs_draft_probs: bool = True
    """Whether the rule reads the distributions that draft tokens were drawn from."""
    is_coupled: bool = False
    """Whether drafter and target draw with the same noise."""
    takes_trees: bool = False
    """Whether blocks may be token trees at any temperature; at temperature 0 they may be under every rule."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidRequestError(
                "rejection_sample_method: a rule's name has 1 to 64 letters, digits, '_', '.' and '-'"
            )


def unknown_rule(known: Iterable[str]) -> InvalidRequestError:
    """Returns the error for a rule that is not offered, which names those that are."""
    return InvalidRequestError(f"unknown rejection_sample_method; known: {', '.join(known)}")
