"""Drafts without a model through the services: made by the verifier, or by a drafter service without weights."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.law import LENGTH, PROMPT, LawResult, compare, draw_completions, exact_law, stack_options
from draftwire.client import Client, Completion
from draftwire.drafting import cascade_drafter
from draftwire.drafting.model_free.store_building import build_store
from draftwire.errors import InvalidRequestError
from draftwire.models.card import load_card
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack

Options = dict[str, dict[str, object]]
ALPHA = 1e-6
"""Probability of a false alarm of each comparison."""
SAMPLES = 300


@pytest.fixture(scope="module")
def law(pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    return exact_law(pair[0], SamplingParams())


@pytest.fixture(scope="module")
def store(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A retrieval store of texts that tell little of what the target writes."""
    folder = tmp_path_factory.mktemp("retrieval") / "store"
    description = load_card(str(pair[0])).description
    tokens = np.random.default_rng(1).integers(0, description.vocab_size, 2000)
    build_store(folder, [tokens], description.vocabulary_fingerprint, description.vocab_size)
    return folder


def local_options(target: Path, strategy: str, store: Path | None = None, **gateway: object) -> Options:
    """Returns the options of a stack without a drafter, whose verifier drafts by itself."""
    options = stack_options(target, target)
    del options["drafter"]
    options["gateway"] |= {"local_drafts": strategy, **gateway}
    options["verifier"]["shared_tokens"] = 5000
    if store is not None:
        options["verifier"]["retrieval_store"] = store
    return options


STRATEGIES = [
    "suffix",
    pytest.param("lookup", marks=pytest.mark.evidence),
    pytest.param("retrieval", marks=pytest.mark.evidence),
    pytest.param("suffix+retrieval", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=STRATEGIES)
def local_stack(pair: tuple[Path, Path], store: Path, request: pytest.FixtureRequest) -> Iterator[InProcessStack]:
    with InProcessStack(local_options(pair[0], request.param, store)) as running:
        yield running


def drawn_law(address: str, rule: str, law: dict[tuple[int, ...], float]) -> tuple[LawResult, list[Completion]]:
    completions = list(draw_completions(address, rule, SamplingParams(), range(SAMPLES)))
    result = compare(rule, completions, law)
    print(result)
    assert result.share_of_rounds_with_draft > 0.3, "a text of three tokens repeats itself"
    assert 0.1 < result.acceptance_rate < 0.9
    return result, completions


@pytest.mark.parametrize(
    "rule", ["block", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("token", "coupled"))]
)
def test_text_that_the_verifier_drafts_for_follows_the_law_of_the_target(
    local_stack: InProcessStack, law: dict[tuple[int, ...], float], rule: str
) -> None:
    """Beside requests of all other kinds. False alarm: 1e-6, by chi-square."""
    result, completions = drawn_law(local_stack.address, rule, law)
    assert result.p_value > ALPHA, result
    assert all(not completion.drafter_error for completion in completions)


@pytest.mark.slow
def test_text_that_a_guess_continues_follows_the_law_of_the_target(
    pair: tuple[Path, Path], store: Path, law: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade_drafter, "LEAST_MATCH", 2)  # texts of three tokens are short
    options = stack_options(*pair)
    options["drafter"] |= {"strategy": "model+suffix+retrieval", "retrieval_store": store}
    with InProcessStack(options) as running:
        result, _ = drawn_law(running.address, "block", law)
    assert result.p_value > ALPHA, result


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_text_with_a_drafter_without_weights_follows_the_targets_law(
    pair: tuple[Path, Path], store: Path, law: dict[tuple[int, ...], float], strategy: str
) -> None:
    options = stack_options(*pair)
    options["drafter"] = {"model": pair[0], "strategy": strategy, "metrics_port": 0}
    options["drafter"] |= {"retrieval_store": store} if "retrieval" in strategy else {}
    options["drafter"] |= {"shared_tokens": 5000} if "suffix" in strategy else {}
    with InProcessStack(options) as running:
        result, _ = drawn_law(running.address, "block", law)
    assert result.p_value > ALPHA, result


def test_text_under_one_salt_shows_nowhere_under_another() -> None:
    """Neither in acceptance nor in what is reported of each token; under its own it does."""
    script = "scripted:verify_ms=1,acceptance=1"
    options: Options = {
        "verifier": {"model": script, "threads": 1, "shared_tokens": 5000},
        "gateway": {"drafter": "none", "speculation": "fixed", "local_drafts": "suffix"},
    }
    with InProcessStack(options) as running, Client(running.address) as client:

        def told(salt: str) -> tuple[int, int, list[float | None]]:
            completion = client.generate(
                "a", max_tokens=60, ignore_eos=True, temperature=0.0, cache_salt=salt, token_details=True
            )
            return (
                completion.statistics.num_draft_tokens,
                completion.statistics.num_accepted_tokens,
                [None if math.isnan(each) else each for each in completion.draft_logprobs],
            )

        before = told("mine")
        for _ in range(10):  # what was shared is indexed little by little, with the guesses of later requests
            told("mine")
        assert told("mine") != before, "its own texts are continued"
        assert told("theirs") == before


def test_requests_name_what_may_draft(pair: tuple[Path, Path]) -> None:
    options = stack_options(*pair)
    options["gateway"]["local_drafts"] = "auto"
    with InProcessStack(options) as running, Client(running.address) as client:
        (model,) = client.server().drafters
        assert list(client.server().drafter_names) == [model.name, "suffix", "lookup"]
        given: dict[str, Any] = {
            "max_tokens": 40,
            "ignore_eos": True,
            "token_details": True,
            "num_speculative_tokens": 4,
        }

        def told(drafter: str | list[str] | None) -> set[bool]:
            """Whether drafts were certain of their tokens, of all those that there were."""
            drawn = client.generate(PROMPT, drafter=drafter, **given).draft_logprobs
            return {each in (0.0, -math.inf) for each in drawn if not math.isnan(each)}

        assert told("lookup") == {True}, "no model has a say"
        assert told(["suffix", "lookup"]) == {True}
        assert False in told(model.name)
        assert False in told(None)
        with pytest.raises(InvalidRequestError, match=f"nothing drafts by the name 'nobody'; there are {model.name}"):
            client.generate(PROMPT, drafter="nobody", **given)


def test_coupled_text_of_a_seed_is_the_same_with_local_drafts_and_without(local_stack: InProcessStack) -> None:
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


def test_verifier_drafts_on_in_the_stream_when_the_only_drafter_is_lost() -> None:
    """And the rounds of the run commit several tokens each."""
    script = "scripted:verify_ms=5,draft_ms=1,acceptance=0.9"
    options: Options = {
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
