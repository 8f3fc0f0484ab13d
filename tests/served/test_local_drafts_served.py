"""Drafts without a model through the services: salts, names, chosen lengths, losses. Their law is in `test_law.py`."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.law import COMPARED, LENGTH, PROMPT, compare, exact_law, stack_options
from draftwire.client import Client
from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack

Options = dict[str, dict[str, object]]
ALPHA = 1e-6
"""Probability of a false alarm of the comparison."""
SAMPLES = 300


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


@pytest.mark.slow
def test_chosen_lengths_of_local_drafts_are_explained_and_leave_the_law(pair: tuple[Path, Path]) -> None:
    """With a stack of its own, without a drafter, whose gateway chooses. False alarm: 1e-6, by chi-square."""
    options = stack_options(*pair)
    del options["drafter"]
    options["verifier"]["shared_tokens"] = 5000
    options["gateway"] |= {"local_drafts": "suffix", "speculation": "adaptive"}
    with InProcessStack(options) as running, Client(running.address) as client, ThreadPoolExecutor(8) as pool:
        asked: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True}
        drawn = list(pool.map(lambda _: client.generate(PROMPT, **asked), range(SAMPLES)))
        (choice,) = client.explain_speculation().choices
    assert (choice.drafter, choice.beside) == ("", "suffix")
    assert any(load.estimates for load in choice.loads)
    assert sum(one.statistics.num_accepted_tokens for one in drawn) > 0
    law = exact_law(pair[0], SamplingParams())
    assert min(compare("block", drawn, law, judged=judged).p_value for judged in COMPARED) > ALPHA / len(COMPARED)


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
