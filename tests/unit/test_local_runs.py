"""What a gateway asks a verifier to draft by itself, and what it learns from that."""

from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import GONE, FakeDrafter, FakeTarget, collect, make_generation, make_loop
from test_drafter_seat import Seating, seating
from virtual_time import in_virtual_time

from benchmarks.pair_simulation import round_times
from draftwire.errors import ProtocolViolationError
from draftwire.method.round_parts import GuessPart, StepSize, WatchedGuess
from draftwire.method.rounds import Fence, LocalDraft, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.options.heads.head_names import HEAD_NAMES
from draftwire_gateway.core import local_strategies
from draftwire_gateway.session.expected_verdict import ExpectedVerdict
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.session.session_option import RunRequest
from draftwire_gateway.speculation.pairs import PairName, Pairs
from draftwire_gateway.speculation.predicted_session import PredictedSession
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser


def seated(num_drafters: int = 0, strategies: tuple[str, ...] = ("suffix",), **changes: Any) -> Seating:
    one = seating(num_drafters, **{"local_strategies": ("suffix",), **changes})
    one.target.description = replace(one.target.description, local_strategies=strategies)
    return one


@in_virtual_time
async def test_without_a_drafter_the_verifier_is_asked_to_draft() -> None:
    one = seated(num_speculative_tokens=3)
    assert one.planner.first_run(one.target, 32) == RunRequest(WhyPlain.NO_DRAFTER, 1), "its prompt is read first"
    one.seat.seek(one.target)
    assert one.planner.next_draft() == PLAIN
    assert one.planner.run(32, 2) == RunRequest(WhyPlain.NO_GUESS, 32, LocalDraft("suffix", 3))


@pytest.mark.parametrize("head", HEAD_NAMES)
@in_virtual_time
async def test_verifier_with_a_head_is_asked_to_draft_by_it_alone(head: str) -> None:
    both = local_strategies("auto")
    one = seated(num_speculative_tokens=3, strategies=(head, "suffix", "lookup"), local_strategies=both)
    one.seat.seek(one.target)
    assert one.planner.run(32, 2).draft == LocalDraft(head, 3, instead="suffix"), "unless it is in quarantine"
    one = seated(num_speculative_tokens=3, strategies=("suffix", "lookup"), local_strategies=both)
    one.seat.seek(one.target)
    assert one.planner.run(32, 2).draft == LocalDraft("suffix", 3), "without one by what it can"
    assert local_strategies(head) == (head,)


@in_virtual_time
async def test_verifier_bridges_the_time_until_a_drafter_is_ready() -> None:
    """If its guesses were right, beside drafters before."""
    one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=True)
    before = one.pairs.session_length(PairName(one.target.address, "drafter", "suffix"))
    for number in range(16):
        before.next_draft(number, 8, 0.1 * number)
        guess, step = GuessPart(watched=WatchedGuess(True, 2)), StepSize(5, 1, number)
        before.observe(round_times(number, 0.1 * number, 0.1 * number + 0.05, 4, 4, 0.01, 0.03, guess=guess, step=step))
    before.close()
    one.seat.seek(one.target)
    request = one.planner.run(32, 2)
    assert (request.why, request.num_rounds) == (WhyPlain.NO_GUESS, 2)
    assert request.draft is not None
    assert request.draft.strategy == "suffix"


@in_virtual_time
async def test_text_without_fresh_numbers_is_not_drafted_for_during_warm_up() -> None:
    for changes in ({"has_own_seed": True}, {"is_retried": True}):
        one = seated(num_drafters=1, **changes)
        one.seat.seek(one.target)
        assert one.planner.run(32, 2) == RunRequest(WhyPlain.WARMING_UP, 2)
    one = seated(num_drafters=1)
    one.session.epoch = 1
    one.seat.seek(one.target)
    assert one.planner.run(32, 2) == RunRequest(WhyPlain.WARMING_UP, 2), "the verifier before may have drawn them"
    one = seated(num_drafters=0, has_own_seed=True)
    one.seat.seek(one.target)
    assert one.planner.run(32, 2).draft == LocalDraft("suffix", 4), "without one it always is"


@in_virtual_time
async def test_opened_session_waits_one_round_for_its_drafter() -> None:
    for adapts in (False, True):
        one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=adapts)
        assert one.planner.first_run(one.target, 32) == RunRequest(WhyPlain.WARMING_UP, 1)


@pytest.mark.parametrize(
    "changes",
    [{"strategies": ()}, {"strategies": ("lookup",)}, {"local_strategies": ()}, {"num_speculative_tokens": 0}],
)
@in_virtual_time
async def test_nothing_is_requested_that_verifier_or_request_rules_out(
    changes: dict[str, Any],
) -> None:
    one = seated(**changes)
    one.seat.seek(one.target)
    request = one.planner.run(32, 2)
    assert (request.draft, request.num_rounds) == (None, 32)


@in_virtual_time
async def test_verifier_without_its_drafter_is_a_pair_of_its_own() -> None:
    one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=True)
    await one.seek_until_ready()
    assert one.planner.next_draft().length == 4, "of the drafter"
    one.seat.give_up(GONE)
    one.seat.seek(one.target)
    request = one.planner.run(32, 2)
    assert (request.why, request.draft) == (WhyPlain.NO_GUESS, LocalDraft("suffix", 4))
    assert one.planner.next_draft() == PLAIN
    assert set(one.pairs.explain()) == {
        PairName(one.target.address, "drafter", "suffix"),
        PairName(one.target.address, "", "suffix"),
    }


def verdict(num_draft_tokens: int, rounds_left: int, strategy: str) -> Verdict:
    return Verdict(
        Fence(1, 0, 0, 4, 0), [1], num_draft_tokens, 0, TokenSource.PLAIN, rounds_left, guess=GuessPart(strategy)
    )


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        (verdict(3, 4, "suffix"), True),
        (verdict(0, 4, ""), True),
        (verdict(4, 4, "suffix"), False),
        (verdict(3, 5, "suffix"), False),
        (verdict(3, 4, ""), False),
        (verdict(3, 4, "lookup"), True),
        (verdict(3, 4, "retrieval"), False),
    ],
)
def test_verdict_of_a_local_round_is_of_what_was_asked_for(given: Verdict, is_right: bool) -> None:
    expected = ExpectedVerdict(make_generation(max_tokens=20))
    expected.request_plain(5, LocalDraft("suffix", 3, instead="lookup"))
    if is_right:
        expected.check(given, 100)
        return
    with pytest.raises(ProtocolViolationError):
        expected.check(given, 100)


def test_block_drafted_ahead_may_be_as_long_as_any_requested_before() -> None:
    """Of the round that is requested now too, with fewer draft tokens: it may be held already."""
    for is_ahead in (True, False):
        expected = ExpectedVerdict(make_generation(max_tokens=20, num_speculative_tokens=8))
        expected.request_block(8, is_ahead=is_ahead)
        expected.check(verdict(8, 0, ""), 100)
        expected.end_round(verdict(8, 0, ""))
        expected.request_block(2, is_ahead=is_ahead)
        expected.check(verdict(2, 0, ""), 100)
        if is_ahead:
            expected.check(verdict(8, 0, ""), 100)
        else:
            with pytest.raises(ProtocolViolationError, match="more draft tokens"):
                expected.check(verdict(8, 0, ""), 100)


@pytest.mark.parametrize(
    ("watched", "adapts_length", "is_right"),
    [
        (WatchedGuess(True, 1), True, True),
        (WatchedGuess(False, 0), True, True),
        (WatchedGuess(True, 2), True, False),
        (WatchedGuess(False, 1), True, False),
        (WatchedGuess(True, 1), False, False),
    ],
)
def test_watched_guess_is_of_the_rounds_tokens_and_was_asked_for(
    watched: WatchedGuess, adapts_length: bool, is_right: bool
) -> None:
    expected = ExpectedVerdict(make_generation(max_tokens=20, adapts_length=adapts_length))
    expected.request_plain(5)
    given = replace(verdict(0, 4, ""), guess=GuessPart(watched=watched))
    if is_right:
        expected.check(given, 100)
        return
    with pytest.raises(ProtocolViolationError):
        expected.check(given, 100)


@in_virtual_time
async def test_verifier_watches_what_it_could_draft_where_that_is_chosen() -> None:
    for adapts_length, strategies, watched in (
        (True, ("suffix",), LocalDraft("suffix", 8)),
        (True, ("eagle3", "suffix"), LocalDraft("eagle3", 8, instead="suffix")),
        (True, (), None),
        (False, ("suffix",), None),
    ):
        target = FakeTarget(accepts=[2] * 40)
        target.description = replace(target.description, local_strategies=strategies)
        changes = {"local_strategies": ("eagle3", "suffix"), "num_speculative_tokens": 8, "max_tokens": 30}
        loop = make_loop(target, [FakeDrafter(target)], pairs=Pairs(16, 4), adapts_length=adapts_length, **changes)
        (await collect(loop)).assert_whole(30)
        assert target.spec.watched == watched


def test_watched_rounds_teach_the_verifiers_acceptance_beside_a_drafter() -> None:
    chooser = PredictingChooser(8, 4, (DraftSource.DRAFTER, DraftSource.VERIFIER))
    session = PredictedSession(chooser)
    for number in range(100):
        session.next_draft(number, 100, 0.0)
        watched = WatchedGuess(True, 5) if number % 2 else WatchedGuess(False)
        session.observe(round_times(number, 0.0, 0.01, 4, 4, guess=GuessPart(watched=watched)))
    own = chooser.acceptance[DraftSource.VERIFIER]
    assert own.num_drafts == 100
    first, second, *_ = own.rates(5)
    assert first == pytest.approx(0.5, abs=0.06), "rounds without a guess count"
    assert second > 0.9
    assert chooser.acceptance[DraftSource.DRAFTER].num_drafts == 100
    for changes in ({"guess": None}, {"why_plain": WhyPlain.NO_GUESS}):
        session.observe(round_times(100, 0.0, 0.01, 4, 0, **changes))
        assert own.num_drafts == 100, "not known, as while the text is read"


def test_what_was_not_guessed_counts_as_not_accepted() -> None:
    """Else a length would seem to pay for all rounds that pays for those with a guess."""
    chooser = PredictingChooser(8, 4, (DraftSource.VERIFIER,))
    session = PredictedSession(chooser)
    now, rounds = 0.0, 400
    for number in range(rounds):
        session.next_own_length(number, 100, now)
        has_guess = number % 4 == 0
        guess = GuessPart("suffix") if has_guess else GuessPart(watched=WatchedGuess(False))
        tokens = (4, 4) if has_guess else (0, 0)
        session.observe(round_times(number, now, now + 0.01, *tokens, guess=guess))
        now += 0.01
    survival = chooser.acceptance[DraftSource.VERIFIER].survival(4)
    assert sum(survival) == pytest.approx(2.0, abs=0.2)
    assert survival[4] == pytest.approx(0.25, abs=0.06)


def test_rounds_in_which_a_head_still_reads_are_no_drafts_of_it() -> None:
    """Else a long prompt would make the head look wrong."""
    chooser = PredictingChooser(8, 4, (DraftSource.VERIFIER,))
    session = PredictedSession(chooser)
    for number in range(100):
        session.next_own_length(number, 100, 0.01 * number)
        is_reading = number < 20
        told = {"why_plain": WhyPlain.NO_GUESS} if is_reading else {"guess": GuessPart("eagle3")}
        tokens = (0, 0) if is_reading else (4, 4)
        session.observe(round_times(number, 0.01 * number, 0.01 * number + 0.01, *tokens, **told))
    known = chooser.acceptance[DraftSource.VERIFIER]
    assert known.num_drafts == 80
    assert known.rates(1)[0] > 0.9


def test_drafts_of_the_verifier_say_nothing_of_a_drafter() -> None:
    chooser = PredictingChooser(8, 4)
    session = PredictedSession(chooser)
    session.next_draft(0, 100, 0.0)
    session.observe(round_times(0, 0.0, 0.01, 4, 4, guess=GuessPart("suffix")))
    assert [known.num_drafts for known in chooser.acceptance.values()] == [0]


@in_virtual_time
async def test_verifier_drafts_while_the_drafter_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PredictingChooser, "arm_of", lambda *_: Arm(DraftSource.VERIFIER, 4))
    monkeypatch.setattr(PredictingChooser, "num_plain_rounds", lambda chooser, most, now: most)
    one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=True)
    one.planner.first_run(one.target, 32)
    one.seat.seek(one.target)
    request = one.planner.run(32, 2)
    assert (request.why, request.draft) == (WhyPlain.NO_GUESS, LocalDraft("suffix", 4))
    assert one.drafters[0].sessions == [], "no prompt is read for nothing"


def test_verifier_replaces_a_drafter_without_room_at_its_own_best_length() -> None:
    chooser = PredictingChooser(8, 3, (DraftSource.DRAFTER, DraftSource.VERIFIER))
    session = PredictedSession(chooser)
    assert session.next_draft(0, 0, 0.0).length == 0, "it has no room"
    assert session.next_own_length(0, 100, 0.0) == 0, "nothing is known"
    for number in range(8):
        guess, step = GuessPart(watched=WatchedGuess(True, 1)), StepSize(1, 1, number)
        times = (number, 0.1 * number, 0.1 * number + 0.05, 0, 0, 0.0, 0.04)
        session.observe(round_times(*times, guess=guess, step=step))
    assert session.next_own_length(8, 100, 1.0) == 8, "a row was never seen to cost much"
    assert chooser.acceptance[DraftSource.DRAFTER].num_drafts == 0


@in_virtual_time
async def test_each_source_learns_from_its_own_rounds() -> None:
    one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=True)
    await one.seek_until_ready()
    number = one.session.round
    one.seat.drafter.request_block(one.planner.next_draft())
    one.policy.observe(round_times(number, 0.0, 0.01, 4, 4))
    (chooser,) = one.pairs.choosers.values()
    assert {source: known.num_drafts for source, known in chooser.acceptance.items()} == {
        DraftSource.DRAFTER: 1,
        DraftSource.VERIFIER: 0,
    }
