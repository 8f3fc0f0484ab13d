"""The chooser that predicts: prices of steps, acceptance, what it chooses in simulated time, and how short it is."""

import ast
import inspect
import random
from statistics import mean

import pytest

from benchmarks.pair_simulation import SimulatedPair, Simulation, constant, round_times
from draftwire.method.round_parts import GuessPart, StepSize, WatchedGuess
from draftwire.models.description import WarmUpStep
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation import (
    accepted_counts,
    pair_model,
    predicted_session,
    predicting_chooser,
    step_prices,
)
from draftwire_gateway.speculation.accepted_counts import MEMORY, ROUNDS, AcceptedCounts
from draftwire_gateway.speculation.pair_model import WarmUp
from draftwire_gateway.speculation.pairs import PairName, Pairs
from draftwire_gateway.speculation.predicted_session import PredictedSession
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser
from draftwire_gateway.speculation.step_prices import RecentMean, StepPrices

MODULES = (step_prices, accepted_counts, pair_model, predicting_chooser, predicted_session)
MOST_LINES, MOST_CONSTANTS = 766, 15


def test_chooser_is_short_and_has_few_constants() -> None:
    sources = [inspect.getsource(module) for module in MODULES]
    num_lines = sum(len(source.splitlines()) for source in sources)
    constants = [
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value not in (0, 1, 2)
    ]
    print(f"\n{num_lines} lines, constants {constants}")
    assert num_lines <= MOST_LINES
    assert len(constants) <= MOST_CONSTANTS


def steps(prices: tuple[float, float, float, float], seed: int, slowness: float = 1.0) -> StepPrices:
    """Measures steps of several sizes, whose times vary by a twentieth; after half of them the machine is slower."""
    draws, known = random.Random(seed), StepPrices()
    for number in range(400):
        sessions = draws.randint(1, 16)
        size = (1.0, float(sessions * draws.choice((1, 3, 5))), float(sessions), sessions * draws.random())
        seconds = sum(price * each for price, each in zip(prices, size, strict=True)) * draws.gauss(1.0, 0.05)
        known.add(size, seconds * (slowness if number >= 200 else 1.0), number * 0.1)
    return known


@pytest.mark.parametrize("slowness", [1.0, 1.5])
def test_prices_of_steps_are_found(slowness: float) -> None:
    prices = (0.02, 0.001, 0.0005, 0.002)
    known = steps(prices, 0, slowness)
    for size in ((1.0, 1.0, 1.0, 0.5), (1.0, 16.0, 16.0, 8.0), (1.0, 80.0, 16.0, 8.0)):
        seconds = slowness * sum(price * each for price, each in zip(prices, size, strict=True))
        assert known.predict(size) == pytest.approx(seconds, rel=0.05)


def test_step_that_several_sessions_report_counts_once() -> None:
    once, often = StepPrices(), StepPrices()
    for number in range(5):
        for known, times in ((once, 1), (often, 16)):
            for _ in range(times):
                known.add((1.0, 16.0 + number, 16.0, 0.0), 0.05 + number / 1000, float(number))
    assert once.prices == often.prices


def test_acceptance_is_that_of_the_drafts_and_survives_chance() -> None:
    draws, counts = random.Random(1), AcceptedCounts()
    for _ in range(4 * int(MEMORY)):
        counts.add(4, next((at for at in range(4) if draws.random() > 0.8), 4))
    assert counts.rates(4) == pytest.approx([0.8] * 4, abs=0.06)


def test_change_of_the_text_is_noticed_within_some_drafts() -> None:
    counts = AcceptedCounts()
    for number in range(300):
        counts.add(4, 4 if number % 10 else 0)
    for _ in range(16):
        counts.add(4, 0)
    assert counts.rates(1)[0] < 0.4


def test_session_expects_what_the_pair_does_until_its_own_drafts_differ() -> None:
    pair = AcceptedCounts()
    for _ in range(100):
        pair.add(2, 2)
    own = AcceptedCounts(pair)
    assert own.rates(2) == pair.rates(2)
    for _ in range(20):
        own.add(2, 0)
    assert own.rates(2)[0] < 0.6 < pair.rates(2)[0]


@pytest.mark.parametrize(
    ("acceptance", "sessions", "least"), [(0.1, 1, 0.93), (0.9, 1, 0.93), (0.1, 16, 0.92), (0.9, 4, 0.92)]
)
def test_chosen_drafts_are_near_the_best_from_the_first_seconds(acceptance: float, sessions: int, least: float) -> None:
    pair = SimulatedPair(0.02, 0.001, 0.002, constant(acceptance), sessions, own_acceptance=0.1)
    fixed = [PLAIN, *(Arm(DraftSource.DRAFTER, length) for length in (2, 8))]
    best = max(mean(Simulation(pair, arm, seed).tokens_per_s(10.0) for seed in range(2)) for arm in fixed)
    chosen = [Simulation(pair, None, seed, chooser_of(pair)).tokens_per_s(10.0) for seed in range(2)]
    assert mean(chosen) > least * best


def test_rounds_ahead_are_chosen_where_they_hide_the_drafting() -> None:
    pair = SimulatedPair(0.02, 0.0, 0.004, constant(0.9), 1, ahead=0.95)
    chooser = chooser_of(pair)
    Simulation(pair, None, 0, chooser).tokens_per_s(10.0)
    assert chooser.arm.source is DraftSource.AHEAD


def chooser_of(pair: SimulatedPair) -> PredictingChooser:
    """Returns a chooser that knows nothing."""
    return PredictingChooser(8, 4, pair.sources)


def test_guesses_that_were_watched_are_known_without_a_trial() -> None:
    chooser = PredictingChooser(8, 4, (DraftSource.DRAFTER, DraftSource.VERIFIER))
    session = PredictedSession(chooser)
    watched = GuessPart(watched=WatchedGuess(True, 1))
    for number in range(20):
        session.next_draft(number, 8, 0.1 * number)
        step = StepSize(1, 1, number)
        session.observe(round_times(number, 0.1 * number, 0.1 * number + 0.05, 0, 0, guess=watched, step=step))
    assert chooser.acceptance[DraftSource.VERIFIER].rates(1)[0] > 0.9


def test_room_limits_what_is_drafted() -> None:
    session = PredictedSession(PredictingChooser(8, 4))
    assert session.next_draft(0, 2, 0.0) == Arm(DraftSource.DRAFTER, 2)
    assert session.next_draft(0, 0, 0.0) == PLAIN


def test_sessions_are_counted_out_and_what_is_chosen_is_explained() -> None:
    pairs, name = Pairs(8, 4), PairName("a:1", "small", "suffix")
    session = pairs.session_length(name)
    for number in range(2 * ROUNDS):
        arm = session.next_draft(number, 8, 0.1 * number)
        times = (number, 0.1 * number, 0.1 * number + 0.05, arm.length, arm.length, 0.01, 0.02)
        session.observe(round_times(*times, step=StepSize(arm.length + 1, 1, number)))
    explained = pairs.explain()[name]
    assert explained.num_sessions == 1
    (load,) = explained.loads
    chosen = pairs.choosers[name].arm
    assert (load.min_sessions, load.max_sessions, load.arm) == (1, 1, chosen)
    assert [way.arm for way in load.ways] == [
        PLAIN,
        *(Arm(source, length) for source in (DraftSource.DRAFTER, DraftSource.VERIFIER) for length in range(1, 9)),
    ]
    rates, expected = pairs.choosers[name].rates(1), pairs.choosers[name].model
    for way in load.ways:
        assert sum(way.parts) == pytest.approx(expected.round_s(way.arm, 1, pairs.choosers[name].now))
        assert way.share * way.tokens_per_round / sum(way.parts) == pytest.approx(rates[way.arm])
    (first,) = (way for way in load.ways if way.arm == Arm(DraftSource.DRAFTER, 4))
    assert first.num_rounds == ROUNDS - 1, "the drafter had the text to read in one"
    assert first.parts == pytest.approx((0.02, 0.01, 0.02), rel=0.2)
    session.close()
    assert pairs.explain()[name].num_sessions == 0


def test_client_that_does_not_read_misleads_no_prediction() -> None:
    """Its round is reported with all of its pause."""
    pair = PredictingChooser(8, 4)
    session, at = PredictedSession(pair), 0.0
    for number in range(221):
        arm, pause_s = session.next_draft(number, 8, at), 190.0 if number == 200 else 0.0
        if number == 200:
            before = pair.rates(1)
        spent = (0.01 * arm.uses_drafter, 0.02)
        times = (number, at, at + 0.03, arm.length, arm.length, *spent)
        session.observe(round_times(*times, step=StepSize(arm.length + 1, 1, number), gateway_s=pause_s))
        at += 0.03 + pause_s
    assert min(pair.rates(1).values()) > 0.5 * min(before.values())
    assert pair.arm.uses_drafter


def test_first_rounds_are_chosen_by_the_warm_up() -> None:
    steps = [WarmUpStep(2, 20_000), WarmUpStep(64, 30_000)]
    own = PredictingChooser(8, 4, (DraftSource.VERIFIER,), WarmUp(steps))
    own.join()
    assert own.arm == Arm(DraftSource.VERIFIER, 4), "what its own drafts take is told by none"
    for draft_us, uses_drafter in ((1_000, True), (60_000, False)):
        pair = PredictingChooser(8, 4, warm_up=WarmUp(steps, [WarmUpStep(2, draft_us), WarmUpStep(64, draft_us)]))
        for _ in range(8):
            pair.join()
        assert pair.arm.uses_drafter == uses_drafter


def test_value_weighs_no_more_than_all_together() -> None:
    known = RecentMean()
    known.add(1.0, 1.0, 0.0, 16.0)
    known.add(0.5, 100.0, 1.0, 16.0)
    assert 0.5 <= known.value <= 1.0


def test_round_that_is_reported_late_is_taken() -> None:
    """A request whose client does not read reports it when that reads on, after rounds of others."""
    pair = PredictingChooser(8, 4, (DraftSource.DRAFTER, DraftSource.VERIFIER))
    others = PredictedSession(pair)
    for number in range(8000):
        arm = others.next_draft(number, 8, 0.05 * number)
        times = (number, 0.05 * number, 0.05 * number + 0.03, arm.length, arm.length, 0.01, 0.02)
        others.observe(round_times(*times, step=StepSize(arm.length + 1, 1, number)))
    for number in range(8000, 8020):
        arm = others.next_draft(number, 8, 1.0)
        times = (number, 1.0, 1.03, arm.length, 0, 0.01, 0.02)
        others.observe(round_times(*times, step=StepSize(arm.length + 1, 1, number)))


def test_verifier_that_reports_no_sizes_of_steps_drafts_the_first_length() -> None:
    """One of an earlier version: nothing is predicted of it, however many drafts were counted."""
    session = PredictedSession(PredictingChooser(8, 4, (DraftSource.VERIFIER,)))
    for number in range(3 * ROUNDS):
        assert session.next_own_length(number, 100, 0.1 * number) == 4
        times = (number, 0.1 * number, 0.1 * number + 0.05, 4, 4)
        session.observe(round_times(*times, guess=GuessPart("suffix")))
