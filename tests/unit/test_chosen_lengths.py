"""Chosen lengths of drafts in simulated time: near the best, whatever that is, and soon so again when it changes."""

from statistics import mean

import pytest

from benchmarks.pair_simulation import SimulatedPair, Simulation, constant, round_times
from benchmarks.simulated_pair import bursts
from draftwire.method.round_parts import StepSize
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.accepted_counts import ROUNDS
from draftwire_gateway.speculation.pair_model import load_of
from draftwire_gateway.speculation.pairs import MAX_PAIRS, PairName, Pairs
from draftwire_gateway.speculation.predicted_session import PredictedSession
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser


def drafts(length: int, source: DraftSource = DraftSource.DRAFTER) -> Arm:
    return Arm(source, length)


def fixed_rate(pair: SimulatedPair, arm: Arm, *span: float) -> float:
    return Simulation(pair, arm).tokens_per_s(*span)


def chosen_rate(pair: SimulatedPair, *span: float, seed: int = 0) -> tuple[float, PredictingChooser]:
    """Returns the tokens/s with chosen drafts, and what has chosen them. Guesses are watched, as in services."""
    chooser = PredictingChooser(8, 4, pair.sources)
    if pair.own_acceptance is not None:
        for _ in range(ROUNDS):
            chooser.acceptance[DraftSource.VERIFIER].add(8, round(8 * pair.own_acceptance))
    return Simulation(pair, None, seed, chooser).tokens_per_s(*span), chooser


def test_drop_of_acceptance_is_noticed_within_a_second_and_a_rise_later() -> None:
    falls = SimulatedPair(0.005, 2e-4, 5e-4, lambda now: 0.9 if now < 10 else 0.1, 1)
    assert chosen_rate(falls, 21.0, 11.0)[0] > 0.93 * fixed_rate(falls, PLAIN, 10.0)
    rises = SimulatedPair(0.005, 2e-4, 5e-4, lambda now: 0.1 if now < 10 else 0.9, 1)
    assert chosen_rate(rises, 40.0, 30.0)[0] > 0.93 * fixed_rate(rises, drafts(8), 40.0, 30.0)


GUESSING = {
    "certain guesses beside a good drafter": (1.0, 0.9, 200, drafts(8, DraftSource.VERIFIER)),
    "guesses that come to nothing": (0.0, 0.9, 200, drafts(8)),
    "nothing is worth its rows": (0.0, 0.02, 2000, PLAIN),
}


@pytest.mark.parametrize("num_sessions", [1, 16])
@pytest.mark.parametrize("case", GUESSING)
def test_whoever_drafts_best_is_chosen(case: str, num_sessions: int) -> None:
    own, acceptance, row_us, best = GUESSING[case]
    pair = SimulatedPair(0.020, row_us * 1e-6, 5e-4, constant(acceptance), num_sessions, own_acceptance=own)
    rate, chooser = chosen_rate(pair, 30.0, 10.0)
    assert rate > 0.95 * fixed_rate(pair, best, 10.0, 1.0)
    assert chooser.arm.source is best.source


GOING_AHEAD = {
    "a long way between the services": (0.005, 0.0, DraftSource.AHEAD),
    "cores that drafter and verifier share": (0.0001, 0.02, DraftSource.DRAFTER),
}


@pytest.mark.parametrize("case", GOING_AHEAD)
def test_drafter_goes_ahead_of_the_verdict_where_that_pays(case: str) -> None:
    hop_s, ahead_s, best = GOING_AHEAD[case]
    pair = SimulatedPair(0.010, 1e-5, 1e-3, constant(0.9), 1, hop_s, ahead=0.7, ahead_s=ahead_s)
    for seed in range(3):
        rate, chooser = chosen_rate(pair, 30.0, 15.0, seed=seed)
        assert chooser.arm.source is best
        assert rate > 0.93 * fixed_rate(pair, drafts(8, best), 10.0, 1.0)
        assert chooser.acceptance[DraftSource.AHEAD] is chooser.acceptance[DraftSource.DRAFTER], "drafts are the same"


def test_drafts_that_come_to_nothing_are_hardly_tried_any_more() -> None:
    pair = SimulatedPair(0.005, 2e-4, 0.002, constant(0.1), 1, own_acceptance=0.0)
    assert chosen_rate(pair, 60.0, 20.0)[0] > 0.98 * fixed_rate(pair, PLAIN, 40.0)


def test_prediction_for_a_length_that_is_not_chosen_is_near_what_it_makes() -> None:
    pair = SimulatedPair(0.020, 2e-4, 5e-4, constant(0.8), 1)
    expected = chosen_rate(pair, 30.0)[1].rates(1)
    for arm in (PLAIN, *map(drafts, (1, 2, 4, 6))):
        assert expected[arm] == pytest.approx(fixed_rate(pair, arm, 40.0, 1.0), rel=0.15), arm


def test_drafts_are_measured_when_all_sessions_have_a_drafter() -> None:
    """Which reads their texts first, one after the other, for longer than a choice takes."""
    pair = SimulatedPair(0.250, 0.010, 0.020, constant(0.8), 4, prompt_s=1.2)
    best = max(fixed_rate(pair, arm, 60.0, 20.0) for arm in (PLAIN, drafts(4)))
    assert chosen_rate(pair, 60.0, 20.0)[0] > 0.9 * best


@pytest.mark.parametrize("case", ["16 sessions, drafts pay", "16 sessions, drafts do not pay"])
def test_texts_that_begin_and_end_together_are_near_the_best_length(case: str) -> None:
    """Though each burst ends soon after the drafters have read its texts."""
    pair = bursts()[case]
    best = max(fixed_rate(pair, arm, 30.0) for arm in (PLAIN, drafts(4), drafts(8)))
    assert chosen_rate(pair, 72.0, 24.0)[0] > 0.92 * best


def test_session_drafts_less_where_its_own_drafts_fare_badly() -> None:
    pair = SimulatedPair(0.005, 0.001, 0.001, constant(0.95), 1)
    chooser = chosen_rate(pair, 20.0)[1]
    assert chooser.arm.length >= 4
    chooser.num_sessions = 0
    poor, lengths, at = PredictedSession(chooser), [], 20.0
    for number in range(40):
        arm = poor.next_draft(number, 100, at)
        times = (number, at, at + 0.01, arm.length, 0, 0.001 * arm.length, 0.005)
        poor.observe(round_times(*times, step=StepSize(1 + arm.length, 1, number)))
        lengths.append(arm.length)
        at += 0.01
    assert mean(lengths[-20:]) < 2.5 < 4 <= mean(lengths[:4])


def test_sessions_that_join_one_by_one_begin_as_those_that_begin_together() -> None:
    chooser = PredictingChooser(8, 4)
    for number in range(16):
        chooser.join()
        assert chooser.arm == (PLAIN if number else drafts(4)), "each draft of several costs the others"
        assert 1 <= chooser.num_plain_rounds(32, 0.0) <= 2, "a choice is near"


def test_request_that_ends_before_the_next_one_begins_changes_no_load() -> None:
    assert [load_of(sessions) for sessions in (0, 1, 2, 3, 5, 6, 11, 12, 15, 16, 17, 22, 23)] == [
        *(0, 0, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 5)
    ]


def test_lengths_are_bounded_by_what_the_services_take() -> None:
    assert [arm.length for arm in PredictingChooser(3, 4).arms] == [0, 1, 2, 3]
    assert [arm.length for arm in PredictingChooser(16, 4).arms] == list(range(9))
    chooser = PredictingChooser(3, 4)
    chooser.join()
    assert chooser.arm == drafts(3)


def test_pairs_are_remembered_by_verifier_and_model_up_to_a_bound() -> None:
    pairs = Pairs(16, 4)
    first = pairs.session_length(PairName("a:1", "small"))
    pairs.session_length(PairName("a:1", "small"))
    ((explained),) = pairs.explain().values()
    assert explained.num_sessions == 2
    first.close()
    for number in range(2 * MAX_PAIRS):
        pairs.session_length(PairName(f"b:{number}", "small")).close()
    assert len(pairs.explain()) <= MAX_PAIRS + 1
    assert pairs.explain()[PairName("a:1", "small")].num_sessions == 1, "a pair in use is kept"
