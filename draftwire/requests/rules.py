"""What there is to know of the verification rules that servers offer, without computing any: no torch here."""

from dataclasses import dataclass

from draftwire.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """One rule, as it says itself; see `draftwire.verification.rule.VerificationRule`."""

    name: str
    is_lossless: bool = True
    """Whether the text is distributed as the target's."""
    needs_draft_probs: bool = True
    """Whether it asks for the distributions that draft tokens were drawn from."""
    is_coupled: bool = False
    """Whether drafter and target draw with the same noise."""


RULE_FACTS = {
    facts.name: facts
    for facts in (
        RuleFacts("block"),
        RuleFacts("token"),
        RuleFacts("coupled", needs_draft_probs=False, is_coupled=True),
        RuleFacts("typical", is_lossless=False, needs_draft_probs=False),
    )
}
"""All rules that a server offers, the default first."""


def facts_of(name: str) -> RuleFacts:
    """Returns what there is to know of a rule.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    if name not in RULE_FACTS:
        raise InvalidRequestError(f"unknown rejection_sample_method; known: {', '.join(RULE_FACTS)}")
    return RULE_FACTS[name]
