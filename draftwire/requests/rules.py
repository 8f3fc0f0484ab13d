"""What there is to know of a verification rule without computing it: no torch here. Verifiers say which they offer."""

from collections.abc import Iterable
from dataclasses import dataclass

from draftwire.errors import InvalidRequestError

MAX_NAME_LENGTH = 64
"""Characters of a rule's name, at most."""


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """One rule, as it says itself; see `draftwire.verification.rule.VerificationRule`.

    Raises:
        InvalidRequestError: the name is empty or too long.
    """

    name: str
    is_lossless: bool = True
    """Whether the text is distributed as the target's."""
    needs_draft_probs: bool = True
    """Whether it asks for the distributions that draft tokens were drawn from."""
    is_coupled: bool = False
    """Whether drafter and target draw with the same noise."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= MAX_NAME_LENGTH:
            raise InvalidRequestError(f"rejection_sample_method has 1 to {MAX_NAME_LENGTH} characters")


def unknown_rule(known: Iterable[str]) -> InvalidRequestError:
    """Returns the error for a rule that nobody offers.

    Args:
        known: names of those that are offered.
    """
    return InvalidRequestError(f"unknown rejection_sample_method; known: {', '.join(known)}")
