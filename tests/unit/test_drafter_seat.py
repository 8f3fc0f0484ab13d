"""The drafter's seat alone: who has it, what it is asked, and how it is lost. No text and no verdicts."""

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from gateway_fakes import GONE, PROMPT, STORY, FakeDrafter, FakePeers, FakeTarget, make_generation
from virtual_time import in_virtual_time, now

from benchmarks.pair_simulation import round_times
from draftwire.errors import NoRoomError
from draftwire.method.round_parts import AheadPart, BranchLimits, StepSize
from draftwire.method.rounds import BlockSent, DraftTimings, Permit, SendDrafted, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.models.description import (
    DRAFT_AHEAD,
    DRAFTS_ON_OUTCOMES,
    HELD_BLOCKS,
    ISSUED_IDENTITIES,
    PARTIAL_BLOCKS,
)
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import MAX_PLACE_S, StructuredOutput
from draftwire_gateway.session.drafter_seat import MAX_MISSING_BLOCKS, NO_BLOCK, DrafterSeat
from draftwire_gateway.session.event_queue import EventQueue
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource, Policy
from draftwire_gateway.session.ports import DrafterLost, DrafterReady, SessionEvent
from draftwire_gateway.session.round_planner import RoundPlanner
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.session.round_trip_estimate import FIRST_TIMEOUT_S, LEAST_FLUSH_S, LEAST_TIMEOUT_S
from draftwire_gateway.session.seated_drafter import MAX_STRETCH
from draftwire_gateway.session.session_option import RunRequest
from draftwire_gateway.session.session_state import SessionState
from draftwire_gateway.session_plugs import options_of, policy_of
from draftwire_gateway.speculation.pairs import SESSIONS_PER_TRIAL, PairName, Pairs
from draftwire_gateway.speculation.predicted_session import PredictedSession


def chain(length: int) -> Arm:
    return Arm(DraftSource.DRAFTER, length)


@dataclass
class Seating:
    """A seat, and the drafters that may have it. The session is on a verifier already."""

    seat: DrafterSeat
    planner: RoundPlanner
    policy: Policy
    session: SessionState
    queue: EventQueue
    target: FakeTarget
    drafters: list[FakeDrafter]
    pairs: Pairs

    def restart(self) -> bool:
        self.session.epoch += 1
        return self.seat.restart(self.target)

    def seek(self) -> None:
        self.seat.seek(self.target)

    async def hear(self) -> SessionEvent:
        """Returns what the drafter of the seat says next; those that were given up may have spoken before."""
        while True:
            said = await self.queue.get()
            if (said.epoch, said.permit_number) == (self.session.epoch, self.seat.permit_number):
                return said.event

    async def seek_until_ready(self) -> FakeDrafter:
        """Returns the drafter that took the seat."""
        self.seek()
        assert isinstance(await self.hear(), DrafterReady)
        self.seat.mark_ready()
        permit = Permit.make(self.session.permit_key, self.seat.permit_number)
        return next(each for each in self.drafters if each.sessions and each.spec.permit in (None, permit))

    def end_round(self, tokens: list[int], num_draft_tokens: int = 0, ago_s: float = 0.0, **told: Any) -> None:
        """A verdict of the open round came, some time ago."""
        told["timings"] = DraftTimings(1_000, 3_000)
        verdict = Verdict(self.session.fence, tokens, num_draft_tokens, 0, TokenSource.PLAIN, 0, **told)
        self.seat.end_round(verdict, now() - ago_s)
        self.session.commit(verdict)

    async def learn(self, seconds: float) -> None:
        """Lets a block take so long."""
        self.seat.drafter.request_block(chain(4))
        await asyncio.sleep(seconds)
        self.end_round(STORY[:1], num_draft_tokens=4)

    def reply(self, number: int) -> bool:
        """The drafter replies to the flush of a round."""
        return self.seat.note_sent(BlockSent(self.session.session_id, self.session.epoch, number), now())


def seating(num_drafters: int = 1, context_lengths: tuple[int, ...] = (), **changes: Any) -> Seating:
    target = FakeTarget()
    lengths = context_lengths or (10_000,) * num_drafters
    drafters = [FakeDrafter(target, context_length=length, instance_id=number) for number, length in enumerate(lengths)]
    for drafter in drafters:
        drafter.on_calibration = lambda calibration: None  # no verifier takes blocks here
    session, queue = SessionState(make_generation(**changes)), EventQueue()
    pairs = Pairs(8, 4)
    policy, options = policy_of(session.generation, pairs), options_of(session)
    seat = DrafterSeat(session, FakePeers([target], drafters), queue, policy, options)
    planner = RoundPlanner(session, seat, policy, options)
    session.epoch = 0
    return Seating(seat, planner, policy, session, queue, target, drafters, pairs)


def warming_up(one: Seating) -> bool:
    return one.planner.run(32, 2) == RunRequest(WhyPlain.WARMING_UP, 2)


@in_virtual_time
async def test_requested_block_carries_what_was_committed_since_the_last_one() -> None:
    one = seating()
    drafter = await one.seek_until_ready()
    for number in range(3):
        one.end_round(STORY[2 * number : 2 * number + 2])
        one.seat.drafter.request_block(chain(4 - number))
    assert drafter.violations == []
    asked = [(each.base_len, each.token_ids, each.num_draft_tokens) for each in drafter.calibrations]
    prompt_len = len(PROMPT)
    assert asked == [(prompt_len, STORY[:2], 4), (prompt_len + 2, STORY[2:4], 3), (prompt_len + 4, STORY[4:6], 2)]
    assert drafter.calibrations[-1].fence == one.session.fence


@in_virtual_time
async def test_rounds_are_counted_by_whether_their_block_was_drafted_ahead() -> None:
    """A round whose block was there is a hit, one whose block came after it began is late, and no miss."""
    one = seating(rounds_ahead=2, max_branches=8)
    one.target.description = replace(one.target.description, capabilities=frozenset({HELD_BLOCKS}))
    one.drafters[0].description = replace(one.drafters[0].description, capabilities=frozenset({DRAFT_AHEAD}))
    drafter = await one.seek_until_ready()
    assert drafter.spec.ahead == BranchLimits(8, 12)
    ends = [{}, {"is_ahead": True}, {"next_is_held": True}, {"is_ahead": True, "held_bytes": 7}]
    ends += [{"next_is_held": True}, {}]  # the last one's block is held, and set aside
    counts = []
    for number, told in enumerate(ends):
        one.seat.drafter.request_block(Arm(DraftSource.AHEAD, 2))
        ahead = AheadPart(num_wasted_draft_tokens=number, **told)
        one.end_round(STORY[number : number + 1], num_draft_tokens=2, ahead=ahead)
        statistics = one.session.statistics
        counts.append((statistics.num_ahead_hits, statistics.num_ahead_late, statistics.num_ahead_misses))
    assert counts == [(0, 0, 1), (0, 1, 1), (0, 1, 2), (1, 1, 2), (1, 1, 3), (1, 1, 4)]
    one.end_round(STORY[6:7])
    assert (statistics.num_ahead_misses, statistics.num_ahead_wasted_tokens, statistics.max_held_bytes) == (4, 15, 7)


@pytest.mark.parametrize(("rounds_ahead", "source", "allowed"), [(0, "drafter", 1), (2, "drafter", 0), (2, "ahead", 2)])
@in_virtual_time
async def test_drafter_begins_chains_on_outcomes_unless_it_has_branches(
    rounds_ahead: int, source: str, allowed: int
) -> None:
    """It would draft for these, although a chooser has found that strict drafting is faster."""
    one = seating(rounds_ahead=rounds_ahead, max_branches=8 * bool(rounds_ahead), adapts_length=True)
    capabilities = frozenset({DRAFT_AHEAD, DRAFTS_ON_OUTCOMES, HELD_BLOCKS})
    for peer in (one.target, one.drafters[0]):
        peer.description = replace(peer.description, capabilities=capabilities)
    drafter = await one.seek_until_ready()
    one.seat.drafter.request_block(Arm(DraftSource(source), 4))
    assert drafter.calibrations[-1].max_rounds_ahead == allowed


SLOW_US, FAST_US = 100_000, 20
IN_FORM = SamplingParams(structured_output=StructuredOutput.regex("a*"))


@in_virtual_time
async def test_nothing_is_drafted_after_slow_masks_until_they_are_fast_again() -> None:
    one = seating(sampling=IN_FORM, num_speculative_tokens=4, max_tokens=60)
    await one.seek_until_ready()
    for mask_us, expected in ((FAST_US, chain(4)), (SLOW_US, PLAIN)):
        one.seat.drafter.request_block(one.planner.next_draft())
        one.end_round(STORY[:1], num_draft_tokens=4, mask_us=mask_us)
        assert one.planner.next_draft() == expected
    assert one.planner.run(64, 8) == RunRequest(WhyPlain.SLOW_MASKS, 8)
    for _ in range(30):
        one.end_round(STORY[:1], mask_us=FAST_US)
    assert one.planner.next_draft() == chain(4)
    assert one.planner.run(64, 8).why is not WhyPlain.SLOW_MASKS


@in_virtual_time
async def test_chosen_lengths_are_not_blamed_for_masks_that_took_long() -> None:
    one = seating(sampling=IN_FORM, num_speculative_tokens=4, adapts_length=True)
    await one.seek_until_ready()
    assert one.planner.next_draft() == chain(4)
    one.seat.drafter.request_block(one.planner.next_draft())
    one.end_round(STORY[:1], num_draft_tokens=4, mask_us=SLOW_US)
    assert one.planner.next_draft() == PLAIN
    assert one.planner.run(64, 8) == RunRequest(WhyPlain.SLOW_MASKS, 8)


@in_virtual_time
async def test_rounds_that_may_have_begun_are_requested_despite_slow_masks() -> None:
    """Their blocks may depend on their tokens, which must not decide whether they are used."""
    one = seating(sampling=IN_FORM, rounds_ahead=2, num_speculative_tokens=4)
    one.target.description = replace(one.target.description, capabilities=frozenset({HELD_BLOCKS}))
    one.drafters[0].description = replace(one.drafters[0].description, capabilities=frozenset({DRAFT_AHEAD}))
    await one.seek_until_ready()
    one.seat.drafter.request_block(one.planner.next_draft())
    for number in range(2):
        one.end_round(STORY[number : number + 1], num_draft_tokens=4, mask_us=SLOW_US)
        arm = one.planner.next_draft()
        assert arm == Arm(DraftSource.DRAFTER, 4), "it allows no further round to begin"
        one.seat.drafter.request_block(arm)
    one.end_round(STORY[2:3], num_draft_tokens=4, mask_us=SLOW_US)
    assert one.planner.next_draft() == PLAIN


@in_virtual_time
async def test_drafter_that_takes_over_is_told_all_and_shows_a_higher_permit() -> None:
    one = seating(num_drafters=2)
    first = await one.seek_until_ready()
    one.end_round(STORY[:3])
    one.seat.drafter.request_block(chain(4))
    assert one.seat.give_up(GONE)
    second = await one.seek_until_ready()
    assert second is not first
    assert second.spec.token_ids == [*PROMPT, *STORY[:3]]
    permits = [drafter.spec.permit for drafter in (first, second)]
    assert permits == [Permit.make(one.session.permit_key, number) for number in (0, 1)]
    one.seat.drafter.request_block(chain(4))
    assert (second.calibrations[0].token_ids, second.violations) == ([], [])


@in_virtual_time
async def test_drafter_with_an_identity_gets_its_permit_by_the_first_calibration() -> None:
    """Where one of the two does not know identities, the permit comes when the session is opened, and names nobody."""
    for of_drafter, of_target in itertools.product((False, True), repeat=2):
        one = seating()
        drafter = one.drafters[0]
        for peer, has_it in ((drafter, of_drafter), (one.target, of_target)):
            own = {ISSUED_IDENTITIES} if has_it else set()
            peer.description = replace(peer.description, capabilities=frozenset(own))
        drafter.identity = 2**63
        await one.seek_until_ready()
        for number in range(2):
            one.end_round(STORY[number : number + 1])
            one.seat.drafter.request_block(chain(4))
        key = one.session.permit_key
        opened_with, asked_with = drafter.spec.permit, [each.permit for each in drafter.calibrations]
        if of_drafter and of_target:
            assert (opened_with, asked_with) == (None, [Permit.make(key, 0, 2**63), None])
        else:
            assert (opened_with, asked_with) == (Permit.make(key, 0), [None, None])


@in_virtual_time
async def test_loss_is_counted_once_and_says_whether_a_block_was_awaited() -> None:
    for is_asked, is_decided in ((False, False), (True, False), (True, True)):
        one = seating()
        drafter = await one.seek_until_ready()
        if is_asked:
            one.seat.drafter.request_block(chain(4))
        if is_decided:
            one.end_round(STORY[:1])
        assert one.seat.give_up(GONE) == (is_asked and not is_decided)
        assert not one.seat.give_up(NoRoomError("told again")), "it is gone"
        assert (one.session.statistics.num_drafters_lost, one.seat.error) == (1, "gone")
        assert drafter.closed == [(one.session.session_id, 0)]
        assert (one.seat.is_ready, one.seat.is_awaited, one.seat.room) == (False, False, 0)


@in_virtual_time
async def test_reason_of_a_loss_is_told_if_it_is_meant_to_be_read() -> None:
    """Anything else may quote the prompt."""
    one = seating(num_drafters=2)
    for error, told in ((GONE, "gone"), (RuntimeError("the prompt is: secret"), "internal error: RuntimeError")):
        one.drafters[one.seat.permit_number + 1].open_error = error
        one.seek()
        lost = await one.hear()
        assert isinstance(lost, DrafterLost)
        one.seat.give_up(lost.error)
        assert one.seat.error == told


@in_virtual_time
async def test_taken_seat_is_not_offered_and_nobody_is_asked_twice_per_verifier() -> None:
    one = seating(num_drafters=2)
    first, second = one.drafters
    await one.seek_until_ready()
    one.seek()
    assert (first.opened, second.opened) == (1, 0)
    for _ in range(3):
        one.seat.give_up(GONE)
        one.seek()
        await asyncio.sleep(0)
    assert (first.opened, second.opened) == (1, 1)
    assert one.restart()
    await one.seek_until_ready()
    assert (first.opened, second.opened, first.spec.epoch, one.seat.permit_number) == (2, 1, 1, 2)


@in_virtual_time
async def test_room_is_what_the_drafters_context_leaves_once_it_is_ready() -> None:
    one = seating(context_lengths=(len(PROMPT) + 6,))
    assert (one.seat.room, warming_up(one)) == (0, False)
    one.seek()
    assert (one.seat.room, warming_up(one)) == (0, True)
    await one.hear()
    one.seat.mark_ready()
    assert (one.seat.room, warming_up(one)) == (5, False)
    one.end_round(STORY[:3])
    assert one.seat.room == 2


@in_virtual_time
async def test_drafters_of_too_short_a_context_are_skipped_and_named_if_alone() -> None:
    short = len(PROMPT)
    one = seating(context_lengths=(short - 1, short, 10_000))
    assert one.restart()
    assert await one.seek_until_ready() is one.drafters[2]
    assert one.seat.error == ""
    other = seating(context_lengths=(short - 1, short))
    assert not other.restart()
    assert other.seat.error == f"the text is longer than the drafter's context of {short}"
    unwanted = seating(num_speculative_tokens=0)
    assert not unwanted.restart()
    unwanted.seek()
    assert (warming_up(unwanted), unwanted.seat.error) == (False, "")


@in_virtual_time
async def test_time_of_blocks_is_learned_and_that_of_plain_rounds_is_not() -> None:
    one = seating()
    await one.seek_until_ready()
    for seconds in (0.0, 4.0):
        await asyncio.sleep(seconds)
        one.end_round(STORY[:1])
    assert one.seat.drafter.timeout_s(4, 5.0) == FIRST_TIMEOUT_S, "nothing is known"
    one.seat.drafter.request_block(chain(4))
    one.end_round(STORY[:1])
    await asyncio.sleep(4.0)
    one.end_round(STORY[:1])
    assert one.seat.drafter.timeout_s(4, 5.0) == LEAST_TIMEOUT_S


@in_virtual_time
async def test_hurry_names_the_round_and_the_next_block_is_not_hurried() -> None:
    one = seating()
    drafter = await one.seek_until_ready()
    one.seat.drafter.request_block(chain(4))
    assert one.seat.drafter.can_flush
    one.seat.drafter.request_flush()
    assert (one.seat.drafter.can_flush, drafter.hurried) == (False, [SendDrafted(one.session.session_id, 0, 0)])
    one.end_round(STORY[:1])
    one.seat.drafter.request_block(chain(4))
    assert (one.seat.drafter.can_flush, drafter.violations) == (True, [])


@pytest.mark.parametrize("is_ready", [False, True])
@in_virtual_time
async def test_seat_that_is_dropped_leaves_nothing_open_and_asks_nobody(is_ready: bool) -> None:
    one = seating()
    (drafter,) = one.drafters
    drafter.ready_after = 0 if is_ready else 10_000
    one.seek()
    await asyncio.sleep(0)
    one.seat.drop()
    one.seat.drop()
    await asyncio.sleep(0)
    assert (drafter.closed, drafter.open_cancelled) == ([(one.session.session_id, 0)], not is_ready)
    assert (one.session.statistics.num_drafters_lost, one.seat.error) == (0, "")


# A block is late


def is_idle(seat: DrafterSeat) -> tuple[bool, bool, int]:
    """Returns whether a block is awaited, whether the drafter is asleep, and whether it has room for blocks."""
    return seat.is_awaited, seat.is_asleep, seat.room > 0


@in_virtual_time
async def test_silent_drafter_is_asleep_and_asked_again_when_it_replies() -> None:
    one = seating()
    drafter = await one.seek_until_ready()
    await one.learn(0.01)
    one.seat.drafter.request_block(chain(4))
    one.seat.drafter.request_flush()
    one.seat.drafter.fall_asleep()
    assert is_idle(one.seat) == (False, True, False)
    one.end_round(STORY[1:2])
    one.end_round(STORY[2:3])
    assert is_idle(one.seat) == (False, True, False)
    assert not one.reply(0), "to an older flush"
    assert one.seat.is_asleep
    assert not one.reply(1), "its block is stale"
    assert is_idle(one.seat) == (False, False, True)
    one.seat.drafter.request_block(chain(4))
    assert (drafter.calibrations[-1].token_ids, drafter.violations) == (STORY[1:3], [])
    assert (drafter.closed, one.session.statistics.num_drafters_lost) == ([], 0)


@in_virtual_time
async def test_block_that_is_judged_wakes_its_drafter() -> None:
    """The verifier was late, or its plain round was: which of both it takes first is its own matter."""
    for capabilities in (frozenset({PARTIAL_BLOCKS}), None):
        one = seating()
        drafter = await one.seek_until_ready()
        if capabilities is not None:
            drafter.description = replace(drafter.description, capabilities=capabilities)
        one.seat.drafter.request_block(chain(4))
        one.seat.drafter.request_flush()
        one.seat.drafter.fall_asleep()
        one.end_round(STORY[:3], num_draft_tokens=4)
        assert is_idle(one.seat) == (False, False, True)
        assert one.session.statistics.num_drafters_lost == 0


@in_virtual_time
async def test_drafter_that_cannot_reply_is_given_up_with_its_late_block() -> None:
    one = seating()
    drafter = await one.seek_until_ready()
    drafter.description = replace(drafter.description, capabilities=frozenset({PARTIAL_BLOCKS}))
    assert one.seat.drafter.flush_timeout_s(5.0) == 5.0
    one.seat.drafter.request_block(chain(4))
    one.seat.drafter.request_flush()
    one.seat.drafter.fall_asleep()
    one.end_round(STORY[:1])
    assert (one.seat.error, one.session.statistics.num_drafters_lost) == (NO_BLOCK, 1)


@in_virtual_time
async def test_drafter_that_replied_is_given_up_if_its_blocks_keep_missing() -> None:
    one = seating()
    await one.seek_until_ready()
    for number in range(MAX_MISSING_BLOCKS + 1):
        one.seat.drafter.request_block(chain(4))
        one.seat.drafter.request_flush()
        assert one.reply(one.session.round), "it is the verifier's turn"
        assert not one.reply(one.session.round), "a reply that is repeated wins no time"
        one.seat.drafter.fall_asleep()
        assert is_idle(one.seat) == (False, False, True)
        one.end_round(STORY[:1], num_draft_tokens=4 * (number == 0))
        if number == 0:
            one.seat.drafter.request_block(chain(4))
            one.end_round(STORY[:1])
        assert one.session.statistics.num_drafters_lost == (number == MAX_MISSING_BLOCKS)


@in_virtual_time
async def test_drafter_that_sleeps_for_long_is_given_up_only_for_another_one() -> None:
    for num_drafters, lost in ((1, 0), (2, 1)):
        one = seating(num_drafters=num_drafters)
        await one.seek_until_ready()
        one.seat.drafter.request_block(chain(4))
        one.seat.drafter.request_flush()
        one.seat.drafter.fall_asleep()
        one.end_round(STORY[:1])
        for seconds in (4.0, 2.0):
            assert one.session.statistics.num_drafters_lost == 0
            await asyncio.sleep(seconds)
            one.seat.seek(one.target, longest_sleep_s=5.0)
        assert one.session.statistics.num_drafters_lost == lost
        await asyncio.sleep(1.0)  # until a session is open
        num_opened = sum(drafter.opened for drafter in one.drafters)
        assert (num_opened, one.seat.permit_number) == (num_drafters, num_drafters - 1)


@in_virtual_time
async def test_time_of_a_block_ends_when_its_verdict_arrives_not_when_it_is_read() -> None:
    """Who reads a text may be away in between."""
    one = seating()
    await one.seek_until_ready()
    await one.learn(0.01)
    before = one.seat.drafter.timeout_s(4, 5.0), one.seat.drafter.flush_timeout_s(5.0)
    one.seat.drafter.request_block(chain(4))
    await asyncio.sleep(60.0)
    one.end_round(STORY[1:2], num_draft_tokens=4, ago_s=59.99)
    assert (
        (one.seat.drafter.timeout_s(4, 5.0), one.seat.drafter.flush_timeout_s(5.0))
        == before
        == (LEAST_TIMEOUT_S, LEAST_FLUSH_S)
    )


@in_virtual_time
async def test_reply_of_a_session_with_a_form_is_awaited_for_a_mask_longer() -> None:
    for form, mask_s in ((None, 0.0), (StructuredOutput.regex("a*"), MAX_PLACE_S)):
        one = seating(sampling=SamplingParams(structured_output=form))
        await one.seek_until_ready()
        assert one.seat.drafter.flush_timeout_s(5.0) == FIRST_TIMEOUT_S + mask_s
        await one.learn(0.01)
        assert one.seat.drafter.flush_timeout_s(5.0) == LEAST_FLUSH_S + mask_s
        assert one.seat.drafter.flush_timeout_s(0.1) == 0.1
        assert one.seat.drafter.timeout_s(4, 5.0) == LEAST_TIMEOUT_S, "the flush itself is as early as for others"


@in_virtual_time
async def test_slow_drafter_makes_all_sessions_patient_and_one_pause_does_not() -> None:
    """Sixteen sessions of one drafter wait for the same step of six seconds."""
    one = seating()
    drafter = await one.seek_until_ready()
    for _ in range(10):
        await one.learn(0.01)
    others = [seating() for _ in range(16)]
    for other in others:
        other.drafters[0].round_trip = drafter.round_trip
        await other.seek_until_ready()
        other.seat.drafter.request_block(chain(4), 5.0)
    await asyncio.sleep(6.0)
    for other in others:
        other.end_round(STORY[:1], num_draft_tokens=4)
    assert one.seat.drafter.timeout_s(4, 5.0) < 5.0 * MAX_STRETCH * LEAST_TIMEOUT_S
    for _ in range(30):
        one.seat.drafter.request_block(chain(4), 5.0)
        await asyncio.sleep(2.0)
        one.end_round(STORY[1:2], num_draft_tokens=4)
    assert one.seat.drafter.timeout_s(4, 5.0) > 4.0


def named_seating(*models: str, **changes: Any) -> Seating:
    """Returns a session with a drafter of each model, in the order in which they are preferred by load."""
    one = seating(len(models), **changes)
    for drafter, model in zip(one.drafters, models, strict=True):
        drafter.description = replace(drafter.description, name=model)
    return one


async def opened_on(one: Seating) -> str:
    drafter = await one.seek_until_ready()
    return drafter.description.name


@in_virtual_time
async def test_drafters_of_a_requested_model_are_taken_and_no_others() -> None:
    assert await opened_on(named_seating("large", "small")) == "large"
    assert await opened_on(named_seating("large", "small", draft_models=frozenset({"small"}))) == "small"
    one = named_seating("large", "small", draft_models=frozenset({"suffix"}))
    assert not one.restart()


@in_virtual_time
async def test_drafter_that_does_what_the_verifier_can_is_left_alone() -> None:
    for offered, taken in (((), "suffix"), (("suffix",), "large")):
        one = named_seating("suffix", "large", local_strategies=("suffix",))
        one.target.description = replace(one.target.description, local_strategies=offered)
        assert await opened_on(one) == taken


@in_virtual_time
async def test_of_several_models_that_is_taken_with_which_sessions_were_fastest() -> None:
    rounds_s = {"large": 0.010, "small": 0.004}

    def seen(*measured: str, session_id: int = 1, adapts_length: bool = True) -> Seating:
        one = named_seating("large", "small", adapts_length=adapts_length, num_speculative_tokens=8)
        one.session.session_id = session_id
        for model in measured:
            see(one, model, rounds_s[model])
        return one

    assert await opened_on(seen("large", "small")) == "small"
    assert await opened_on(seen("small")) == "large", "nothing is known of it"
    assert await opened_on(seen("large")) == "small"
    assert await opened_on(seen("large", "small", adapts_length=False)) == "large", "by load: nothing is chosen for it"
    tried = {await opened_on(seen("large", "small", session_id=SESSIONS_PER_TRIAL * turn)) for turn in range(2)}
    assert tried == {"large", "small"}, "one that was slow is tried now and then"


def see(one: Seating, model: str, round_s: float, since_s: float = 0.0, num_rounds: int = 60) -> None:
    """Lets another session of the gateway have rounds with the drafters of a model."""
    session = one.pairs.session_length(PairName(one.target.address, model))
    for number in range(num_rounds):
        started = since_s + number * round_s
        session.next_draft(number, 100, started)
        step = StepSize(5, 1, number)
        session.observe(round_times(number, started, started + round_s, 4, 2, 0.0, round_s, step=step))
    session.close()


@in_virtual_time
async def test_session_keeps_its_model_while_its_rounds_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another one has become faster; a new epoch keeps it too, and where it has gone, another takes over."""
    monkeypatch.setattr(PredictedSession, "uses_drafter", lambda *_: False)
    one = named_seating("large", "small", adapts_length=True, num_speculative_tokens=8)
    see(one, "large", 0.010)
    see(one, "small", 0.020)

    def joined() -> list[str]:
        return [name.drafter_model for name, own in one.pairs.explain().items() if own.num_sessions]

    one.seek()
    assert joined() == ["large"]
    see(one, "small", 0.001, 100.0, 5000)
    names = [PairName(one.target.address, model) for model in ("large", "small")]
    assert one.pairs.preferred(names, 1).drafter_model == "small", "it is what a new session would take"
    one.seek()
    assert joined() == ["large"]
    one.restart()
    assert joined() == ["large"]
    one.drafters.pop(0)
    one.seek()
    assert joined() == ["small"]


@in_virtual_time
async def test_length_and_size_that_a_request_names_are_those_of_each_round() -> None:
    for nodes, expected in ((0, chain(3)), (12, Arm(DraftSource.DRAFTER, 3, 12))):
        one = seating(num_speculative_tokens=3, num_draft_nodes=nodes)
        for peer in (one.target, one.drafters[0]):
            peer.description = replace(peer.description, max_tree_nodes=16)
        assert one.planner.next_draft() == PLAIN, "nobody is ready"
        await one.seek_until_ready()
        assert one.planner.next_draft() == expected
