"""The output of the three processes follows the target's law."""

from pathlib import Path

import pytest

from benchmarks.law import compare, draw_completions, exact_law
from draftwire.sampling import SamplingParams
from draftwire.services.local_stack import LocalStack
from draftwire.verification import RULES

ALPHA = 1e-6
"""Probability of a false alarm of each test. Seeds are fixed, but block borders depend on timing."""


@pytest.mark.parametrize("rule", RULES)
def test_sampled_outputs_follow_the_law_of_the_target(stack: LocalStack, pair: tuple[Path, Path], rule: str) -> None:
    law = exact_law(pair[0], SamplingParams())
    completions = list(draw_completions(stack.address, rule, SamplingParams(), range(4_000)))
    result = compare(rule, completions, law)
    assert result.share_of_rounds_with_draft > 0.15, "the drafter took part"
    assert 0.2 < result.acceptance_rate < 0.8, "some draft tokens were rejected and some accepted"
    assert result.p_value > ALPHA, result


def test_truncated_distributions_follow_the_law_of_the_target(stack: LocalStack, pair: tuple[Path, Path]) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=2, top_p=0.9)
    law = exact_law(pair[0], sampling)
    completions = list(draw_completions(stack.address, "block", sampling, range(1_000)))
    result = compare("block", completions, law)
    assert result.p_value > ALPHA, result
    assert all(law[tuple(c.token_ids[-5:])] > 0.0 for c in completions), "nothing impossible was emitted"
