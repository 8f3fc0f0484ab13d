"""What a gateway asks a verifier to draft by itself, and what it learns from that."""

from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import GONE, in_virtual_time, make_generation
from test_drafter_seat import Seating, seating

from benchmarks.simulated_pair import round_times
from draftwire.errors import ProtocolViolationError
from draftwire.method.rounds import Fence, LocalDraft, Verdict
from draftwire.method.token_source import TokenSource
from draftwire_gateway.session.drafter_seat import RunRequest
from draftwire_gateway.session.expected_verdict import ExpectedVerdict
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.speculation.arms import Arm, Source
from draftwire_gateway.speculation.pair_chooser import PairChooser, Window
from draftwire_gateway.speculation.pairs import PairName
from draftwire_gateway.speculation.session_length import SessionLength


def seated(num_drafters: int = 0, strategies: tuple[str, ...] = ("suffix",), **changes: Any) -> Seating:
    one = seating(num_drafters, **{"local_strategies": ("suffix",), **changes})
    one.target.description = replace(one.target.description, local_strategies=strategies)
    return one


@in_virtual_time
async def test_without_a_drafter_the_verifier_is_asked_to_draft() -> None:
    one = seated(num_speculative_tokens=3)
    assert one.seat.first_run(one.target, 32) == RunRequest(WhyPlain.NO_DRAFTER, 1), "its prompt is read first"
    one.seat.seek(one.target)
    assert one.seat.next_length() < 1
    assert one.seat.run(32, 2) == RunRequest(WhyPlain.NO_GUESS, 32, LocalDraft("suffix", 3))


@in_virtual_time
async def test_verifier_bridges_the_time_until_a_drafter_is_ready() -> None:
    one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=True)
    one.seat.seek(one.target)
    assert one.seat.run(32, 2) == RunRequest(WhyPlain.NO_GUESS, 2, LocalDraft("suffix", 4))


@in_virtual_time
async def test_text_of_a_repeatable_seed_is_not_drafted_for_while_the_drafter_warms_up() -> None:
    one = seated(num_drafters=1, has_repeatable_seed=True)
    one.seat.seek(one.target)
    assert one.seat.run(32, 2) == RunRequest(WhyPlain.WARMING_UP, 2)
    one = seated(num_drafters=0, has_repeatable_seed=True)
    one.seat.seek(one.target)
    assert one.seat.run(32, 2).draft == LocalDraft("suffix", 4), "without one it always is"


@in_virtual_time
async def test_session_that_is_opened_waits_for_its_drafter_for_one_round_whatever_the_verifier_could_draft() -> None:
    for adapts in (False, True):
        one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=adapts)
        assert one.seat.first_run(one.target, 32) == RunRequest(WhyPlain.WARMING_UP, 1)


@pytest.mark.parametrize(
    "changes",
    [{"strategies": ()}, {"strategies": ("lookup",)}, {"local_strategies": ()}, {"num_speculative_tokens": 0}],
)
@in_virtual_time
async def test_nothing_is_asked_for_that_the_verifier_does_not_offer_or_the_request_forbids(
    changes: dict[str, Any],
) -> None:
    one = seated(**changes)
    one.seat.seek(one.target)
    request = one.seat.run(32, 2)
    assert (request.draft, request.num_rounds) == (None, 32)


@in_virtual_time
async def test_verifier_without_its_drafter_is_a_pair_of_its_own() -> None:
    one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=True)
    await one.seek_until_ready()
    assert one.seat.next_length() == 4, "of the drafter"
    one.seat.give_up(GONE)
    one.seat.seek(one.target)
    request = one.seat.run(32, 2)
    assert (request.why, request.draft) == (WhyPlain.NO_GUESS, LocalDraft("suffix", 4))
    assert one.seat.next_length() == 0
    assert set(one.pairs.explain()) == {
        PairName(one.target.address, "drafter", "suffix"),
        PairName(one.target.address, "", "suffix"),
    }


def verdict(num_draft_tokens: int, rounds_left: int, strategy: str) -> Verdict:
    return Verdict(
        Fence(1, 0, 0, 4, 0), [1], num_draft_tokens, 0, TokenSource.PLAIN, rounds_left, local_strategy=strategy
    )


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        (verdict(3, 4, "suffix"), True),
        (verdict(0, 4, ""), True),
        (verdict(4, 4, "suffix"), False),
        (verdict(3, 5, "suffix"), False),
        (verdict(3, 4, ""), False),
        (verdict(3, 4, "lookup"), False),
    ],
)
def test_verdict_of_a_local_round_is_of_what_was_asked_for(given: Verdict, is_right: bool) -> None:
    expected = ExpectedVerdict(make_generation(max_tokens=20))
    expected.request_plain(5, LocalDraft("suffix", 3))
    if is_right:
        expected.check(given, 100)
        return
    with pytest.raises(ProtocolViolationError):
        expected.check(given, 100)


def test_what_was_not_guessed_counts_as_not_accepted() -> None:
    """Else a length would seem to pay for all rounds that pays for those with a guess."""
    chooser = PairChooser(8, 4, (Source.VERIFIER,))
    session = SessionLength(chooser)
    now, rounds = 0.0, 400
    for number in range(rounds):
        session.next_own_length(number, 100, now)
        has_guess = number % 4 == 0
        strategy = {"local_strategy": "suffix"} if has_guess else {}
        drafted, accepted = (4, 4) if has_guess else (0, 0)
        session.observe(round_times(number, now, now + 0.01, drafted, accepted, **strategy))
        now += 0.01
    assert chooser.acceptance[Source.VERIFIER].survival(4)[3] == pytest.approx(0.25, abs=0.06)


def test_drafts_of_the_verifier_say_nothing_of_a_drafter() -> None:
    chooser = PairChooser(8, 4)
    session = SessionLength(chooser)
    session.next_length(0, 100, 0.0)
    session.observe(round_times(0, 0.0, 0.01, 4, 4, local_strategy="suffix"))
    assert [known.num_drafts for known in chooser.acceptance.values()] == [0]


@in_virtual_time
async def test_verifier_drafts_while_the_drafter_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairChooser, "window", lambda chooser, now: Window(Arm(Source.VERIFIER, 4), 0, now, False, now))
    monkeypatch.setattr(PairChooser, "num_plain_rounds", lambda chooser, most, now: most)
    one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=True)
    one.seat.first_run(one.target, 32)
    one.seat.seek(one.target)
    request = one.seat.run(32, 2)
    assert (request.why, request.draft) == (WhyPlain.NO_GUESS, LocalDraft("suffix", 4))
    assert one.drafters[0].sessions == [], "no prompt is read for nothing"


def test_place_of_a_drafter_that_cannot_is_taken_to_the_length_that_is_best_for_the_verifier() -> None:
    chooser = PairChooser(8, 3, (Source.DRAFTER, Source.VERIFIER))
    session = SessionLength(chooser)
    assert session.next_length(0, 0, 0.0) == 0, "it has no room"
    assert session.next_own_length(0, 100, 0.0) == 3, "nothing is known: as at first"
    chooser.window(0.0).all.add(round_times(0, 0.0, 0.1, 3, 0, 0.01, 0.01), 1.0)
    session.observe(round_times(0, 0.0, 9.0, 0, 0, why_plain=WhyPlain.NO_GUESS))
    assert session.next_own_length(1, 100, 9.0) == 8, "guesses seem to cost nothing yet"
    assert chooser.acceptance[Source.VERIFIER].num_drafts == 1
    assert chooser.acceptance[Source.DRAFTER].num_drafts == 0


@in_virtual_time
async def test_each_source_learns_from_its_own_rounds() -> None:
    one = seated(num_drafters=1, num_speculative_tokens=8, adapts_length=True)
    await one.seek_until_ready()
    number = one.session.round
    one.seat.next_length()
    one.seat.ask_for_block(4)
    one.seat.observe(round_times(number, 0.0, 0.01, 4, 4))
    ((drafter, verifier),) = one.pairs.explain().values()
    assert (drafter.source, drafter.num_drafts) == (Source.DRAFTER, 1)
    assert (verifier.source, verifier.num_drafts) == (Source.VERIFIER, 0)
