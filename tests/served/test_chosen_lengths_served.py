"""Chosen lengths through the three services: the law of the text, equal texts under `coupled`, repeatable seeds."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.law import COMPARED, LENGTH, LOSSLESS, PROMPT, compare, exact_law, stack_options
from draftwire.cli.__main__ import app
from draftwire.client import Client, Completion
from draftwire.requests.parameters import SamplingParams
from draftwire_gateway.metrics import GatewayMetrics
from draftwire_gateway.session.policy import PLAIN, Arm
from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser
from tests.in_process import InProcessStack

ALPHA = 1e-6
"""Probability of a false alarm of each comparison."""
SAMPLES = 100
CONCURRENCY = 8


@pytest.fixture(scope="module")
def adaptive_stack(pair: tuple[Path, Path]) -> Iterator[InProcessStack]:
    """The tiny pair, on a gateway that chooses lengths. So small models are faster without drafts, and choose none."""
    options = stack_options(*pair)
    options["gateway"]["speculation"] = "adaptive"
    with InProcessStack(options) as running:
        yield running


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the chooser change its mind with every round, by all that has been accepted so far."""
    turns = count()

    def arm_of(chooser: PredictingChooser, session: object) -> Arm:
        accepted = sum(sum(known.survival(4)) for known in chooser.acceptance.values())
        choices = random.Random(f"{next(turns)} {accepted}")
        length, source = choices.choice((0, 1, 2, 3, 4, 8)), choices.choice(list(chooser.acceptance))
        return Arm(source, length) if length else PLAIN

    monkeypatch.setattr(PredictingChooser, "arm_of", arm_of)
    monkeypatch.setattr(PredictingChooser, "num_plain_rounds", lambda chooser, most, now: 1)
    monkeypatch.setattr(PredictingChooser, "observe", lambda *_, **__: None)


def draw(client: Client, number: int, **options: Any) -> list[Completion]:
    """Draws so many completions side by side."""
    options = {"max_tokens": LENGTH, "ignore_eos": True} | options
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(lambda _: client.generate(PROMPT, **options), range(number)))


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("rule", [LOSSLESS[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in LOSSLESS[1:])])
def test_law_of_the_target_holds_whatever_lengths_past_rounds_choose(
    adaptive_stack: InProcessStack, pair: tuple[Path, Path], rule: str
) -> None:
    with Client(adaptive_stack.address) as client:
        drawn = draw(client, SAMPLES, rejection_sample_method=rule)
    lengths = [sum(counts) for counts in zip(*(padded(one.draft_length_histogram) for one in drawn), strict=True)]
    assert min(lengths[length] for length in (0, 1, 2, 3)) > 0, f"all were chosen: {lengths}"
    law = exact_law(pair[0], SamplingParams())
    assert min(compare(rule, drawn, law, judged=judged).p_value for judged in COMPARED) > ALPHA / len(COMPARED)


def padded(histogram: list[int]) -> list[int]:
    return histogram + [0] * (9 - len(histogram))


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.evidence)])
def test_coupled_text_of_a_seed_is_the_same_for_chosen_and_given_lengths(
    adaptive_stack: InProcessStack, number: int
) -> None:
    with Client(adaptive_stack.address) as client:
        chosen = draw(client, number, rejection_sample_method="coupled", max_tokens=40)
        for one in chosen:
            options = {"seed": one.seed, "rejection_sample_method": "coupled", "num_speculative_tokens": 4}
            given = client.generate(PROMPT, max_tokens=40, ignore_eos=True, **options)
            assert given.token_ids == one.token_ids
    assert any(one.draft_length_histogram[0] for one in chosen)
    assert any(len(one.draft_length_histogram) == 9 for one in chosen)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[RoundTimes]:
    """The rounds of all gateways of this process, as they end."""
    seen: list[RoundTimes] = []
    observe = GatewayMetrics.observe_round

    def observe_round(metrics: GatewayMetrics, times: RoundTimes) -> None:
        seen.append(times)
        observe(metrics, times)

    monkeypatch.setattr(GatewayMetrics, "observe_round", observe_round)
    return seen


def draw_at_rest(client: Client, rounds: list[RoundTimes], seed: int, max_tokens: int = 12) -> list[int]:
    """Draws until every round had all draft tokens that it asks for: under load a block may be late, or end early."""
    for _ in range(5):
        rounds.clear()
        token_ids = client.generate("a", seed=seed, max_tokens=max_tokens).token_ids
        lefts = [max_tokens - sum(before.num_tokens for before in rounds[:index]) for index in range(len(rounds))]
        wanted = [0 if times.is_first else min(4, left - 1) for times, left in zip(rounds, lefts, strict=True)]
        if [times.verdict.num_draft_tokens for times in rounds] == wanted:
            return token_ids
    raise AssertionError(f"drafts have other lengths than the server's: {wanted}, {rounds}")


@pytest.mark.slow
@pytest.mark.usefixtures("restless")
def test_seeded_requests_are_repeatable_at_rest_whatever_others_did(rounds: list[RoundTimes]) -> None:
    """On a pair whose drafter is ready before the first token: when it is decides on the first rounds."""
    script = Path("scripted:acceptance=0.8/0.5,verify_ms=10")
    options = stack_options(script, script)
    options["gateway"]["speculation"] = "adaptive"
    with InProcessStack(options) as stack, Client(stack.address) as client:
        texts = []
        for _ in range(2):
            texts.append([draw_at_rest(client, rounds, seed) for seed in range(20)])
            for _ in range(3):
                client.generate("a", max_tokens=20)
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) > 10


def test_command_explains_what_is_chosen(adaptive_stack: InProcessStack) -> None:
    arguments = ["bench", "--address", adaptive_stack.address, "--requests", "8", "--concurrency", "2", "--runs", "1"]
    arguments += ["--max-tokens", "50", "--ignore-eos", "--explain"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("drafts by drafter for ") == 1, "one table"
    assert len([line for line in shown.output.splitlines() if line.startswith("* ")]) == 1
    assert "must be better by 5 %" in shown.output or "would make" in shown.output
    printed = CliRunner().invoke(app, [*arguments, "--json"])
    explanation = json.loads(printed.output)["explanation"]
    (choice,) = explanation["choices"]
    assert explanation["is_adaptive"]
    assert (choice["drafter"], choice["beside"]) == ("drafter", "")
    (load,) = (load for load in choice["loads"] if load["min_sessions"] == 2)
    ways = [(way["drafter"], way["num_draft_tokens"]) for way in load["estimates"]]
    assert ways == [("", 0), *(("drafter", length) for length in range(1, 9))]


def test_gateway_with_fixed_lengths_says_so(client: Client) -> None:
    assert not client.explain_speculation().is_adaptive
    assert client.generate([1, 2], max_tokens=20).draft_length_histogram[-1] > 0
