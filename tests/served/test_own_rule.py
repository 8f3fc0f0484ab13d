"""A rule of a user's own, served: named in the verifier's configuration, asked for by its name."""

import pytest

from draftwire.client import Client
from draftwire.errors import InvalidRequestError
from tests.in_process import InProcessStack

EXAMPLE = "examples.rules.exact_match.ExactMatchRule"


def test_rule_of_ones_own_is_offered_asked_for_by_name_and_decides() -> None:
    """At temperature 0 all rules keep the same; at 1 the example keeps what the target itself draws."""
    model = {"model": "scripted:acceptance=0.8"}
    options = {"verifier": {**model, "rules": EXAMPLE}, "drafter": model, "gateway": {}}
    with InProcessStack(options) as stack, Client(stack.address) as client:
        assert list(client.server().rejection_sample_methods) == ["block", "token", "coupled", "typical", "exact_match"]
        assert list(client.server().lossy_rejection_sample_methods) == ["typical"]
        asked = {"max_tokens": 200, "num_speculative_tokens": 4, "rejection_sample_method": "exact_match"}
        done, greedy = client.generate("abc", **asked), client.generate("abc", **asked, temperature=0.0)
        plain = client.generate("abc", max_tokens=200, num_speculative_tokens=0, temperature=0.0)
        with pytest.raises(InvalidRequestError, match="known: block, token, coupled, typical, exact_match"):
            client.generate("abc", rejection_sample_method="exactly")
    assert (done.rejection_sample_method, done.is_lossy) == ("exact_match", False)
    assert 0 < done.statistics.num_accepted_tokens < done.statistics.num_draft_tokens
    assert greedy.token_ids == plain.token_ids
    assert greedy.statistics.num_accepted_tokens > 0
