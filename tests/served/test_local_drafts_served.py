"""Drafts without a model through the services: made by the verifier, or by a drafter service without weights."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.law import LENGTH, PROMPT, LawResult, compare, draw_completions, exact_law, stack_options
from draftwire.client import Client, Completion
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack

ALPHA = 1e-6
"""Probability of a false alarm of each comparison."""
SAMPLES = 300


@pytest.fixture(scope="module")
def law(pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    return exact_law(pair[0], SamplingParams())


def local_options(target: Path, strategy: str, **gateway: object) -> dict[str, dict[str, object]]:
    """Returns the options of a stack without a drafter, whose verifier drafts by itself."""
    options = stack_options(target, target)
    del options["drafter"]
    options["gateway"] |= {"local_drafts": strategy, **gateway}
    return options


@pytest.fixture(scope="module", params=["suffix", pytest.param("lookup", marks=pytest.mark.slow)])
def local_stack(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[InProcessStack]:
    with InProcessStack(local_options(pair[0], request.param)) as running:
        yield running


def drawn_law(address: str, rule: str, law: dict[tuple[int, ...], float]) -> tuple[LawResult, list[Completion]]:
    completions = list(draw_completions(address, rule, SamplingParams(), range(SAMPLES)))
    result = compare(rule, completions, law)
    print(result)
    assert result.share_of_rounds_with_draft > 0.3, "a text of three tokens repeats itself"
    assert 0.1 < result.acceptance_rate < 0.9
    return result, completions


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_text_that_the_verifier_drafts_for_follows_the_law_of_the_target(
    local_stack: InProcessStack, law: dict[tuple[int, ...], float], rule: str
) -> None:
    """Beside requests of all other kinds. False alarm: 1e-6, by chi-square."""
    result, completions = drawn_law(local_stack.address, rule, law)
    assert result.p_value > ALPHA, result
    assert all(not completion.drafter_error for completion in completions)


@pytest.mark.parametrize("strategy", ["suffix", pytest.param("lookup", marks=pytest.mark.slow)])
def test_text_that_a_drafter_without_weights_drafts_for_follows_the_law_of_the_target(
    pair: tuple[Path, Path], law: dict[tuple[int, ...], float], strategy: str
) -> None:
    options = stack_options(*pair)
    options["drafter"] = {"model": pair[0], "strategy": strategy, "metrics_port": 0}
    with InProcessStack(options) as running:
        result, _ = drawn_law(running.address, "block", law)
    assert result.p_value > ALPHA, result


def test_text_of_a_seed_is_the_same_under_coupled_with_local_drafts_and_without(local_stack: InProcessStack) -> None:
    def draw(seed: int, num_speculative_tokens: int) -> Completion:
        options: dict[str, Any] = {"rejection_sample_method": "coupled", "max_tokens": 40, "ignore_eos": True}
        return client.generate(PROMPT, seed=seed, num_speculative_tokens=num_speculative_tokens, **options)

    with Client(local_stack.address) as client, ThreadPoolExecutor(4) as pool:
        for seed in range(20):
            drafted, plain = pool.submit(draw, seed, 4), pool.submit(draw, seed, 0)
            assert drafted.result().token_ids == plain.result().token_ids
            assert drafted.result().statistics.num_accepted_tokens > 0
            assert plain.result().statistics.num_draft_tokens == 0


def test_chosen_lengths_of_local_drafts_are_explained_and_leave_the_law(
    pair: tuple[Path, Path], law: dict[tuple[int, ...], float]
) -> None:
    stack = InProcessStack(local_options(pair[0], "suffix", speculation="adaptive"))
    with stack as running, Client(running.address) as client, ThreadPoolExecutor(8) as pool:
        options: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True}
        drawn = list(pool.map(lambda _: client.generate(PROMPT, **options), range(SAMPLES)))
        (choice,) = client.explain_speculation().choices
    assert choice.drafter == "suffix"
    assert choice.num_drafts > 0
    assert sum(one.statistics.num_accepted_tokens for one in drawn) > 0
    assert compare("block", drawn, law).p_value > ALPHA


def test_verifier_drafts_on_where_the_only_drafter_is_lost_within_the_stream() -> None:
    """And the rounds of the run commit several tokens each."""
    script = "scripted:verify_ms=5,draft_ms=1,acceptance=0.9"
    options: dict[str, dict[str, object]] = {
        "verifier": {"model": script, "threads": 1},
        "drafter": {"model": script, "threads": 1},
        "gateway": {"speculation": "fixed", "local_drafts": "suffix"},
    }
    with InProcessStack(options) as running, Client(running.address) as client:
        stream = client.stream("a", max_tokens=400, ignore_eos=True, temperature=0.0)
        num_tokens, accepted_before = 0, 0
        for piece in stream:
            num_tokens += len(piece.token_ids)
            if num_tokens >= 150 and "drafter" in running.services and running.services["drafter"].ending is None:
                running.kill("drafter")
                accepted_before = num_tokens
    done = stream.completion
    assert done.drafter_error
    assert len(done.token_ids) == 400
    assert accepted_before < 250
    rounds_if_plain_after = 400 - accepted_before
    assert done.statistics.num_rounds < rounds_if_plain_after, "drafts were accepted after the loss too"
