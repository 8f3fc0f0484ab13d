"""Blocks that are drafted before their text is known, through the services."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from observing import read_metric

from benchmarks.law import compare, draw_completions, exact_law, stack_options
from draftwire.client import Client
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack, slow_verifiers

ALPHA = 1e-6
"""Probability of a false alarm of each comparison."""
STEP_S = 0.02
"""A verifier's step; meanwhile the drafter drafts ahead."""
SCRIPT = "scripted:verify_ms=20,draft_ms=1,acceptance=0.8,recovered=0.5"


def ahead(options: dict[str, Any], rounds: int = 2) -> dict[str, Any]:
    """Returns a stack's options with drafts for so many rounds ahead."""
    return {**options, "gateway": {**options["gateway"], "draft_ahead_rounds": rounds}}


@pytest.fixture(scope="module")
def ahead_stack(pair: tuple[Path, Path]) -> Iterator[InProcessStack]:
    with slow_verifiers(STEP_S), InProcessStack(ahead(stack_options(*pair))) as running:
        yield running


@pytest.mark.parametrize(
    ("rule", "num_samples"),
    [
        pytest.param("block", 100, marks=pytest.mark.slow),
        pytest.param("coupled", 300, marks=pytest.mark.slow),
        *(pytest.param(rule, 300, marks=pytest.mark.evidence) for rule in ("block", "token")),
    ],
)
def test_text_that_is_drafted_for_ahead_follows_the_law_of_the_target(
    ahead_stack: InProcessStack, pair: tuple[Path, Path], rule: str, num_samples: int
) -> None:
    """False alarm: 1e-6, by chi-square."""
    completions = list(draw_completions(ahead_stack.address, rule, SamplingParams(), range(num_samples), 4))
    result = compare(rule, completions, exact_law(pair[0], SamplingParams()), 4)
    print(result)
    hits = sum(completion.statistics.num_ahead_hits for completion in completions)
    misses = sum(completion.statistics.num_ahead_misses for completion in completions)
    print(f"{hits} hits, {misses} misses")
    assert hits > num_samples / 5, "some blocks were there before they were requested"
    assert misses > num_samples / 5, "and some were not"
    assert all(not completion.drafter_error for completion in completions)
    assert result.p_value > ALPHA, result


@pytest.mark.slow
def test_text_of_a_seed_is_the_same_under_coupled_with_and_without(
    stack: InProcessStack, ahead_stack: InProcessStack
) -> None:
    """But for places where rounding decides, of which both tell."""
    texts = [
        list(draw_completions(one.address, "coupled", SamplingParams(), range(100), 4)) for one in (stack, ahead_stack)
    ]
    for strict, other in zip(*texts, strict=True):
        is_near = strict.statistics.num_near_ties and other.statistics.num_near_ties
        assert strict.token_ids == other.token_ids or is_near


def test_hits_save_the_trip_and_the_drafting() -> None:
    """With a stack of its own: of a script with rejections that the drafter may foresee."""
    options = {name: {"model": SCRIPT, "threads": 1} for name in ("verifier", "drafter")} | {"gateway": {}}
    with InProcessStack(ahead(options)) as running, Client(running.address) as client:
        result = client.generate("a", max_tokens=200, num_speculative_tokens=4)
        statistics = result.statistics
        assert statistics.num_ahead_hits >= 10
        hits = read_metric(running, "verifier", "held_blocks", 'outcome="hit"')
        assert hits >= statistics.num_ahead_hits - 2
        assert read_metric(running, "verifier", "held_blocks", 'outcome="missed"') > 0
        assert read_metric(running, "drafter", "branches", 'outcome="hit"') > 0
        strict = client.generate("a", max_tokens=8, num_speculative_tokens=0)
        assert strict.statistics.num_ahead_hits == strict.statistics.num_ahead_misses == 0


@pytest.mark.slow
def test_going_ahead_is_chosen_by_measurement() -> None:
    """A drafter on cores of its own, which waits for verdicts otherwise."""
    options = {name: {"model": SCRIPT, "threads": 1} for name in ("verifier", "drafter")}
    gateway = {"draft_ahead_rounds": 2, "draft_ahead_branches": 16, "local_drafts": "none"}
    with InProcessStack({**options, "gateway": gateway}) as running, Client(running.address) as client:
        result = client.generate("a", max_tokens=1200, ignore_eos=True)
        choices = {choice.drafter: choice for choice in client.explain_speculation().choices}
    assert set(choices) == {"scripted", "scripted, ahead"}
    (load,) = choices["scripted, ahead"].loads
    assert load.chosen == "scripted, ahead", load
    assert result.statistics.num_ahead_hits > result.statistics.num_rounds / 4
    assert result.statistics.num_verifiers_lost == 0, "blocks of a length before are no violation"
