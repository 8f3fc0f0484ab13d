"""What is learnt of how many draft tokens are accepted."""

import random

import pytest

from draftwire_gateway.speculation.acceptance import MEMORY, NUM_RECENT, AcceptanceEstimate


def test_acceptance_is_by_position_and_ignores_tokens_after_a_refused_one() -> None:
    known = AcceptanceEstimate()
    for accepted in (4, 4, 2, 2) * 100:
        known.add(4, accepted)
    assert known.survival(4) == pytest.approx([1.0, 1.0, 0.5, 0.5], abs=0.03)
    assert known.mean_tokens(4) == pytest.approx(4.0, abs=0.1)
    assert known.survival(6)[5] == pytest.approx(0.5, abs=0.05), "a token fares as the one before it"


def test_texts_that_fare_differently_are_noticed_at_once() -> None:
    known = AcceptanceEstimate()
    for _ in range(1000):
        known.add(4, 4)
    for _ in range(NUM_RECENT):
        known.add(4, 0)
    assert known.survival(1)[0] < 0.35
    shared = AcceptanceEstimate()
    for number in range(2000):
        shared.add(4, 4 * (number % 2))
    before = shared.survival(1)[0]
    assert before == pytest.approx(0.5, abs=0.1), "texts of two kinds are no surprise"


def test_texts_with_easy_and_difficult_parts_are_no_surprise_for_long() -> None:
    known = AcceptanceEstimate()
    surprises = []
    for part in range(200):
        for _ in range(12):
            known.add(8, 8 if part % 2 else 2)
        surprises.append(known.num_surprises)
    assert surprises[20] >= 1
    assert surprises[-1] - surprises[50] <= 5, "once it is known that they have such parts"
    for _ in range(MEMORY):
        known.add(8, 0)
    assert known.survival(1)[0] < 0.5, "but what changes for good is forgotten with time"


def test_prior_counts_until_a_session_knows_better() -> None:
    pair = AcceptanceEstimate()
    for _ in range(500):
        pair.add(2, 2)
    own = AcceptanceEstimate(prior=pair)
    assert own.survival(2) == pair.survival(2)
    for _ in range(60):
        own.add(2, 0)
    assert own.survival(1)[0] < 0.1 < 0.9 < pair.survival(1)[0]


@pytest.mark.parametrize(("acceptance", "length"), [(0.5, 8), (0.95, 4)])
def test_texts_of_one_kind_are_hardly_ever_a_surprise(acceptance: float, length: int) -> None:
    """Many sessions have hundreds of drafts a second, and what is forgotten by mistake is learnt anew for seconds."""
    known, draws = AcceptanceEstimate(), random.Random(1)
    for _ in range(30_000):
        accepted = next((k for k in range(length) if draws.random() >= acceptance), length)
        known.add(length, accepted)
    assert known.num_surprises <= 1
    assert known.survival(1)[0] == pytest.approx(acceptance, abs=0.1)


class CountingPrior:
    """Expects every token to be accepted with one half, and counts how often it is asked."""

    share = 1.0

    def __init__(self) -> None:
        self.num_asked = 0

    def rates(self, num_tokens: int) -> list[float]:
        self.num_asked += 1
        return [0.5] * num_tokens


def test_expectation_is_not_computed_anew_for_each_draft_of_a_session() -> None:
    """All sessions of a step wait for that, and most texts have some fifty drafts."""
    prior = CountingPrior()
    own = AcceptanceEstimate(prior)
    for number in range(48):
        own.add(4, number % 5)
    assert prior.num_asked <= 12
