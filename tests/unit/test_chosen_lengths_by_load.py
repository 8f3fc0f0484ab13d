"""Chosen lengths where the number of sessions changes: texts that come in bursts, and probes that they cut short."""

from dataclasses import replace
from itertools import count
from statistics import mean
from typing import Any

import pytest

from benchmarks.pair_simulation import Simulation, round_times
from benchmarks.simulated_pair import bursts, waves
from draftwire.method.round_parts import GuessPart
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.speculation.pair_chooser import PairChooser
from draftwire_gateway.speculation.pair_estimates import load_of
from draftwire_gateway.speculation.session_length import SessionLength
from draftwire_gateway.speculation.windows import LEAST_ROUNDS, Openings
from tests.unit.simulated_sessions import InStep, first_probe, pair_of


@pytest.mark.slow
def test_loads_that_come_and_go_cost_no_probes_of_their_own() -> None:
    seeds, pair = range(4), waves(0.75)
    plain = [Simulation(pair, 0, seed).tokens_per_s(70.0, 30.0) for seed in seeds]
    chosen = [Simulation(pair, None, seed).tokens_per_s(70.0, 30.0) for seed in seeds]
    assert sum(chosen) > 0.965 * sum(plain)


def test_probe_cut_by_a_change_of_load_resumes_with_it_but_not_for_ever() -> None:
    """Else the texts of a burst, which all end before a probe does, never show what drafts are worth."""
    sessions = InStep(0.05, 0.05)
    sessions.resize(16)
    while not sessions.step().length:
        pass
    first = []
    for _ in range(6):
        sessions.resize(8)
        sessions.steps(0.2)
        sessions.resize(16)
        first.append(sessions.step().length)
    assert first == [1, 1, 0, 0, 0, 0], "a load that comes and goes has no more than its share of probes"


def test_single_step_of_a_probe_that_is_cut_short_says_nothing_of_its_arm() -> None:
    """It may be a slow one, by which all lengths of its source would be judged."""
    sessions = InStep(0.05, 0.05)
    sessions.resize(4)
    while not (arm := sessions.step()).length:
        pass
    assert sessions.step() == arm, "the first that counts: sessions may have had the arm before until then"
    sessions.resize(1)
    sessions.step()
    assert sessions.chooser.known.estimate(arm, load_of(4)).num_windows == 0


def test_drafts_that_do_not_pay_at_one_load_are_tried_with_care_at_others() -> None:
    sessions = InStep(0.05, 0.05)
    sessions.resize(16)
    assert Arm(DraftSource.DRAFTER, 1) in sessions.steps(5.0)
    sessions.resize(8)
    arms = sessions.steps(3.0)
    assert set(arms) == {PLAIN}
    assert Arm(DraftSource.DRAFTER, 1) in sessions.steps(80.0), "they may pay there all the same"


def test_load_that_is_rare_has_no_more_probes_than_its_share_of_the_time() -> None:
    sessions, arms = InStep(0.05, 0.05), []
    for _ in range(20):
        sessions.resize(16)
        sessions.steps(5.0)
        sessions.resize(8)
        arms += sessions.steps(0.3)
    assert set(arms) == {PLAIN}, "a hundred seconds, but six of this load"


@pytest.mark.parametrize(
    ("num_sessions", "end_s", "since_s"),
    [(4, 60.0, 20.0), pytest.param(64, 30.0, 15.0, marks=pytest.mark.slow)],
)
def test_drafts_are_measured_when_all_sessions_have_a_drafter(num_sessions: int, end_s: float, since_s: float) -> None:
    """However long their drafters read the texts first: one after the other, and beside rounds of those that are ready,
    whose steps are shorter for that.
    """
    pair = pair_of(250, 10_000, 20, 0.8, 4) if num_sessions == 4 else pair_of(5, 200, 0.5, 0.95, 64)
    pair = replace(pair, prompt_s=1.2 if num_sessions == 4 else 0.04)
    plain, drafted = (Simulation(pair, length).tokens_per_s(end_s, since_s) for length in (0, 4))
    assert drafted > 1.05 * plain
    chooser = PairChooser(8, 4)
    chosen = Simulation(pair, None, chooser=chooser).tokens_per_s(end_s, since_s)
    assert chosen > 0.9 * drafted
    estimates = chooser.explain(DraftSource.DRAFTER).loads[-1].estimates
    assert num_sessions * estimates[4].tokens_per_second == pytest.approx(drafted, rel=0.2)


def test_window_goes_on_until_several_sessions_have_had_a_round_of_it() -> None:
    """The others are in runs of another arm: two rounds that share the drafter with nobody are no measure of it."""
    sessions = InStep(0.1, 0.01)
    window = first_probe(sessions)
    chooser, began = sessions.chooser, sessions.now

    def rounds(count: int, now: float) -> None:
        for number in range(count):
            times = (number, now - 0.02, now, window.arm.length, window.arm.length, 0.001, 0.019)
            chooser.observe(round_times(*times), window, is_whole=True)

    window.restart(began)
    rounds(2, began + 3.1)
    assert chooser.window(began + 3.1) is window
    rounds(14, began + 3.3)
    assert chooser.window(began + 3.3) is not window
    assert chooser.known.estimate(window.arm, window.load).num_windows == 1


@pytest.mark.parametrize("is_calm", [True, False])
def test_burst_that_ends_while_drafters_read_measures_those_that_had_read(is_calm: bool) -> None:
    """And forgets nothing, though no window beside which prompts were read all the time was calm."""
    sessions = InStep(0.1, 0.01)
    if not is_calm:
        sessions.chooser.join()  # its prompt is being read
    window = first_probe(sessions)
    chooser, now = sessions.chooser, sessions.now
    for number in range(30):
        drafted, plain = ((number, now, now + 0.05, length, length, 0.001, 0.04) for length in (window.arm.length, 0))
        chooser.observe(round_times(*drafted), window, is_whole=True)
        chooser.observe(round_times(*plain, why_plain=WhyPlain.WARMING_UP), window, is_whole=False)
        now += 0.05
    assert chooser.window(now) is window
    assert window.sums.num_rounds < 10, "it began anew"
    sessions.resize(1)
    chooser.window(now)
    assert [chooser.known.estimate(arm, window.load).num_windows > 0 for arm in (window.arm, PLAIN)] == [True, True]


def test_first_window_requests_no_longer_runs_than_it_takes() -> None:
    """Nothing is due then, but what comes next would wait for the runs to end."""
    sessions = InStep(0.3, 0.05)
    sessions.resize(4)
    sessions.step()
    assert sessions.chooser.num_plain_rounds(32, sessions.now) == 9, "of three seconds one round is over"


def test_new_load_starts_with_the_nearest_length_and_bounded_plain_runs() -> None:
    chooser = PairChooser(8, 4)
    Simulation(pair_of(5, 200, 2, 0.1, 1), None, chooser=chooser).tokens_per_s(20.0)
    assert chooser.explain(DraftSource.DRAFTER).loads[0].length == 0
    others, now = [SessionLength(chooser) for _ in range(4)], 20.0
    for number in range(12):
        for session in others:
            assert session.next_draft(number, 100, now).length == 0, "as alone, before anything is known"
            assert 1 <= session.num_plain_rounds(32, now) <= 32
            session.observe(round_times(number, now, now + 0.005, 0, 0, 0.0, 0.005, is_first=number == 0))
        now += 0.005
    assert chooser.window(now).load == 2


def test_request_that_ends_before_the_next_one_begins_changes_no_load() -> None:
    assert [load_of(sessions) for sessions in (0, 1, 2, 3, 5, 6, 11, 12, 15, 16, 17, 22, 23)] == [
        *(0, 0, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 5)
    ]


def test_sessions_that_join_one_by_one_begin_as_those_that_begin_together() -> None:
    chooser = PairChooser(8, 4)
    for number in range(16):
        chooser.join()
        assert chooser.window(0.001 * number).arm == (PLAIN if number else Arm(DraftSource.DRAFTER, 4))


@pytest.mark.parametrize(
    ("case", "least"), [("16 sessions, drafts pay", 0.94), ("16 sessions, drafts do not pay", 0.96)]
)
def test_texts_that_begin_and_end_together_are_near_the_best_length(case: str, least: float) -> None:
    """Though each burst ends soon after the drafters have read its texts, and cuts a probe short that began late."""
    pair = bursts()[case]
    best = max(Simulation(pair, length).tokens_per_s(30.0) for length in (0, 4, 8))
    assert mean(Simulation(pair, None, seed).tokens_per_s(72.0, 24.0) for seed in range(2)) > least * best


def test_texts_that_arrive_one_after_the_other_begin_as_so_many_did_before() -> None:
    """Else the first ones have no drafter when the last ones are there."""
    chooser = PairChooser(8, 4)
    Simulation(pair_of(20, 0, 0.5, 0.95, 16), None, chooser=chooser).tokens_per_s(15.0)
    best = Arm(DraftSource.DRAFTER, chooser.known.best_length(DraftSource.DRAFTER, load_of(16)))
    chooser.num_sessions = 0
    for number in range(11):
        chooser.join()
        assert chooser.window(15.0 + 0.001 * number).arm == best


def test_rounds_longer_than_pauses_without_a_drafter_count_if_alone() -> None:
    sessions = InStep(0.1, 0.01)
    window = first_probe(sessions)
    chooser, now = sessions.chooser, sessions.now
    for number in range(60):
        warming = round_times(number, now, now + 0.02, 0, 0, why_plain=WhyPlain.WARMING_UP)
        chooser.observe(warming, window, is_whole=False)
        drafted = round_times(number, now - 0.11, now + 0.03, window.arm.length, 1, 0.001, 0.1)
        chooser.observe(drafted, window, is_whole=True)
        now += 0.02
    assert window.sums.num_rounds == 0, "each began before the window did anew"
    sessions.resize(1)
    chooser.window(now)
    known = chooser.known.estimate(window.arm, window.load)
    assert known.num_windows == 1
    assert known.round_s == pytest.approx(0.14, rel=0.05)


def drafting(chooser: PairChooser) -> float:
    """Runs one session whose drafts are all accepted, and returns the time when drafts were chosen and measured."""
    session, now, number = SessionLength(chooser), 0.0, 0
    while now < 20.0 or chooser.window(now).expected_rate is None:
        length = session.next_draft(number, 100, now).length
        session.observe(round_times(number, now, now + 0.05, length, length, 0.001, 0.04))
        now, number = now + 0.05, number + 1
    session.close()
    return now


def test_block_of_a_drafter_after_a_guess_of_the_verifier_does_not_count() -> None:
    """The drafter has the text of the guess to read first, and would seem to be slow."""
    chooser = PairChooser(8, 4)
    now = drafting(chooser)
    window, session, counted = chooser.window(now), SessionLength(chooser), []
    for number, strategy in enumerate(("", "", "suffix", "", "")):
        length = session.next_draft(number, 100, now).length
        times = round_times(number, now, now + 0.02, length, length, 0.001, 0.01, guess=GuessPart(strategy))
        session.observe(times)
        now += 0.02
        counted.append(window.all.num_rounds)
    assert chooser.window(now) is window
    assert [number - counted[0] for number in counted] == [0, 1, 1, 1, 2]


def test_window_ends_with_the_round_that_is_a_surprise() -> None:
    chooser = PairChooser(8, 4)
    now = drafting(chooser)
    window, session = chooser.window(now), SessionLength(chooser)
    for number in range(LEAST_ROUNDS // 2):
        length = session.next_draft(number, 100, now).length
        session.observe(round_times(number, now, now + 0.05, length, 0, 0.001, 0.04))
        now += 0.05
        if chooser.acceptance.num_surprises(window.arm) > window.num_surprises:
            break
    assert chooser.acceptance.num_surprises(window.arm) > window.num_surprises
    assert chooser.window(now) is not window


def test_rounds_until_a_drafter_has_read_a_text_are_the_cost_of_a_new_one() -> None:
    chooser = PairChooser(8, 4)
    now = drafting(chooser)
    yields, session, window = chooser.known.loads[0].yields, SessionLength(chooser), chooser.window(now)
    before_s, rate = window.made.seconds, window.expected_rate
    assert rate is not None
    for number in range(4):
        session.next_draft(number, 100, now)
        why = WhyPlain.WARMING_UP if number < 3 else None
        drafted = 0 if number < 3 else 8
        changes: dict[str, Any] = {"is_first": number == 0, "why_plain": why}
        session.observe(round_times(number, now, now + 0.05, drafted, drafted, **changes))
        now += 0.05
    assert window.made.seconds == before_s, "whole rounds alone"
    assert yields.openings.num_openings == pytest.approx(1.0, abs=0.01)
    assert yields.openings.lost_tokens == pytest.approx(0.15 * rate - 2 - 9, rel=0.01)
    session.next_draft(4, 100, now)
    session.observe(round_times(4, now, now + 0.05, 8, 8))
    assert window.made.seconds == pytest.approx(before_s + 0.05)


def test_reading_of_a_drafter_costs_the_text_and_not_the_change_of_arm() -> None:
    known = Openings(num_tokens=1600.0)
    for _ in range(16):
        known.add(1, 6.0, is_over=False)
        known.add(4, 3.0, is_over=True)
    assert known.share == 1.0, "all these texts had begun before"
    known.num_texts = 32.0
    assert known.share == pytest.approx(1600.0 / (1600.0 + 32.0 * 4.0))
    known.fade(0.25)
    assert known.share == pytest.approx(1600.0 / (1600.0 + 32.0 * 4.0))


def test_rounds_that_began_before_the_arm_do_not_count_for_its_yield() -> None:
    chooser = PairChooser(8, 4)
    now = drafting(chooser)
    window = chooser.window(now)
    window.settled_at = now + 1.0
    before_s = window.made.seconds
    for started_at, more_s in ((now + 0.9, 0.0), (now + 1.0, 0.5)):
        times = round_times(0, started_at, started_at + 0.5, 8, 8)
        chooser.count(times, window, 0.5, is_opening=False)
        assert window.made.seconds == pytest.approx(before_s + more_s)


@pytest.mark.parametrize("slowness", [1.0, 2.0])
def test_time_in_no_round_of_the_arm_is_a_loss_and_slower_rounds_are_none(
    slowness: float,
) -> None:
    """Their time is known anew, so that it would count twice."""
    chooser = PairChooser(8, 4)
    now = drafting(chooser)
    chooser._end_window(chooser.window(now), now)
    window, yields = chooser.window(now), chooser.known.loads[0].yields
    yields.drafts.num_tokens = yields.drafts.expected_tokens = 0.0
    for number in range(20):
        times = round_times(number, now, now + slowness * 0.05, 8, 8, 0.001, slowness * 0.04)
        chooser.count(times, window, slowness * 0.05 * (1.25 if number % 2 else 1.0), is_opening=False)
        window.all.add(times, 9.0)
        now = times.ended_at
    chooser._end_window(window, now)
    assert yields.drafts.num_tokens / yields.drafts.expected_tokens == pytest.approx(1 / 1.125)


def test_session_that_ends_before_its_prompt_is_read_is_no_text() -> None:
    chooser = PairChooser(8, 4)
    chooser.window(0.0)
    SessionLength(chooser).close()
    assert chooser.known.loads[0].yields.openings.num_texts == 0.0
    SessionLength(chooser).observe(round_times(0, 0.0, 0.1, 0, 0, is_first=True))
    assert chooser.known.loads[0].yields.openings.num_texts == 1.0


def test_drafts_that_were_slow_beside_prompts_are_tried_when_none_are_read() -> None:
    chooser = PairChooser(8, 4)
    session, now, number = SessionLength(chooser), 0.0, 0
    reader = SessionLength(chooser)
    chooser.num_sessions = 1
    drafted_at: list[float] = []
    while now < 30.0:
        arm = session.next_draft(number, 100, now)
        is_beside = now < 15.0
        took_s = 0.03 + 0.001 * arm.length + 0.2 * (is_beside and arm.length > 0)
        session.observe(
            round_times(number, now, now + took_s, arm.length, min(1, arm.length), 0.001 * arm.length, 0.02)
        )
        now, number = now + took_s, number + 1
        if is_beside and now >= 15.0:
            reader._end_reading(now, is_read=True)
        if not is_beside and arm.length:
            drafted_at.append(now)
    assert drafted_at
    assert drafted_at[0] < 18.0, "after a plain window, though ten times slower is what was measured of them"
    assert len(drafted_at) > 0.5 * (30.0 - 18.0) / 0.04, "and they are chosen then"


def test_probe_waits_until_the_window_before_it_has_measured_something() -> None:
    """Drafters may still read when its turn comes: then the window of the chosen arm would have been in vain."""
    chooser = PairChooser(8, 4)
    now = drafting(chooser)
    chooser._end_window(chooser.window(now), now)
    window = chooser.window(now)
    window.next_due = now
    for number in count():
        if window.all.num_rounds == LEAST_ROUNDS // 2:
            break
        assert chooser.window(now) is window
        reads = round_times(number, now, now + 0.001, 0, 0, why_plain=WhyPlain.WARMING_UP)
        chooser.observe(reads, window, is_whole=False)
        assert chooser.window(now) is window
        now += 0.001
        chooser.observe(round_times(number, now, now + 0.001, 8, 8), window, is_whole=True)
        now += 0.001
    assert chooser.window(now) is not window
