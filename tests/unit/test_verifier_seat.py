"""The verifier's seat alone: who is asked to take a session, when, and with what. No text, no drafter, no rounds."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from gateway_fakes import GONE, PROMPT, STORY, FakePeers, FakeTarget, make_generation
from session_specs import FACTS
from virtual_time import in_virtual_time, now

from draftwire.errors import CompletionInterruptedError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.method.rounds import TargetSessionSpec, Verdict
from draftwire_gateway.session.event_queue import EventQueue
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.ports import TargetPort
from draftwire_gateway.session.session_state import SessionState
from draftwire_gateway.session.verifier_seat import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FUTILE_MOVES, VerifierSeat
from draftwire_gateway.session_plugs import options_of

LIMITS = LoopSettings(failover_timeout_s=30.0)


@dataclass
class Seating:
    """A seat among verifiers, and who was asked to take its session, when."""

    seat: VerifierSeat
    session: SessionState
    queue: EventQueue
    targets: list[FakeTarget]
    plain_rounds: Callable[[TargetPort], int]
    asked: list[tuple[str, float]] = field(default_factory=list)
    withdrawn: list[float] = field(default_factory=list)
    """When all attempts had failed."""

    @property
    def order(self) -> list[str]:
        return [address for address, _ in self.asked]

    def prepare(self, target: TargetPort) -> int:
        self.asked.append((target.address, now()))
        return self.plain_rounds(target)

    def withdraw(self) -> None:
        self.withdrawn.append(now())

    async def open(self, *, waits_for_room: bool) -> None:
        await self.seat.open(self.prepare, self.withdraw, waits_for_room=waits_for_room)

    async def move(self, error: Exception) -> None:
        await self.seat.move(error, self.prepare, self.withdraw)

    async def commit_round(self) -> None:
        """Takes the verdict that the verifier of the seat sends next."""
        while not isinstance(verdict := (await self.queue.get()).event, Verdict):
            pass
        assert verdict.fence == self.session.fence
        self.session.commit(verdict)
        self.session.count(len(verdict.token_ids))
        self.seat.end_round()


def seating(count: int, *, plain_rounds: Callable[[TargetPort], int] = lambda _: 1, **changes: Any) -> Seating:
    """Returns a seat among so many verifiers, which none of them has yet."""
    session, queue = SessionState(make_generation(**changes)), EventQueue()
    targets = [FakeTarget(address=f"target:{number}") for number in range(1, count + 1)]
    seat = VerifierSeat(session, FakePeers(targets), queue, LIMITS, options_of(session))
    return Seating(seat, session, queue, targets, plain_rounds)


@in_virtual_time
async def test_session_moves_with_its_tokens_and_ignores_events_of_the_old_epoch() -> None:
    one = seating(2)
    await one.open(waits_for_room=False)
    for _ in range(3):
        await one.commit_round()
        one.seat.run_plain(1)
    first, second = one.targets
    await one.move(GONE)
    spec = second.spec
    assert (spec.epoch, spec.first_round, spec.token_ids) == (1, 3, [*PROMPT, *STORY[:3]])
    assert (one.seat.address, one.session.statistics.num_verifiers_lost) == (second.address, 1)
    first.tell(first.verdicts[-1])
    assert (await one.queue.get()).epoch == 0 < one.session.epoch
    await one.commit_round()
    assert one.session.num_generated == 4
    assert [target.closed for target in (first, second)] == [[(spec.session_id, 0)], []]


@in_virtual_time
async def test_session_is_opened_where_its_rule_is_offered() -> None:
    one = seating(2, rule="coupled")
    one.targets[0].description = replace(one.targets[0].description, rules=(FACTS["block"],))
    await one.open(waits_for_room=False)
    assert (one.seat.address, one.targets[0].attempts) == (one.targets[1].address, [])
    alone = seating(1, rule="coupled")
    alone.targets[0].description = one.targets[0].description
    with pytest.raises(UnavailableError, match=r"^no verifier offers coupled now$"):
        await alone.open(waits_for_room=False)


@pytest.mark.parametrize(("asked", "max_tokens", "sent"), [(1, 20, 1), (8, 20, 8), (8, 5, 5), (8, 0, 1), (0, 20, 1)])
@in_virtual_time
async def test_first_plain_run_is_as_long_as_wanted_within_the_rest_of_the_text(
    asked: int, max_tokens: int, sent: int
) -> None:
    one = seating(1, plain_rounds=lambda _: asked, max_tokens=max_tokens, num_speculative_tokens=0)
    await one.open(waits_for_room=False)
    assert one.targets[0].spec.plain_rounds == sent


@in_virtual_time
async def test_each_attempt_is_prepared_under_an_epoch_of_its_own() -> None:
    epochs: list[int] = []
    one = seating(3, plain_rounds=lambda _: epochs.append(one.session.epoch) or 1)
    targets = one.targets
    targets[0].open_error = targets[1].open_error = GONE
    await one.open(waits_for_room=False)
    assert epochs == [0, 1, 2]
    assert [target.attempts[0].epoch for target in targets] == epochs
    assert [[epoch for _, epoch in target.closed] for target in targets] == [[0], [1], []]


@in_virtual_time
async def test_preferred_verifier_is_first_and_after_losses_the_most_reliable() -> None:
    one = seating(3)
    one.seat.preferred_address = "target:3"
    await one.open(waits_for_room=False)
    for _ in range(4):
        await one.commit_round()
        await one.move(GONE)
    assert one.order == ["target:3", "target:1", "target:2", "target:3", "target:1"]


@in_virtual_time
async def test_session_that_moves_in_vain_is_given_up_unless_it_advances() -> None:
    one = seating(2)
    await one.open(waits_for_room=False)
    for _ in range(2):
        for _ in range(MAX_FUTILE_MOVES):
            await one.move(GONE)
        await one.commit_round()
    for _ in range(MAX_FUTILE_MOVES):
        await one.move(GONE)
    with pytest.raises(CompletionInterruptedError, match="gone") as interrupted:
        await one.move(GONE)
    assert interrupted.value.num_generated_tokens == 2
    assert len(one.asked) == 1 + 3 * MAX_FUTILE_MOVES
    assert one.seat.address == ""


@in_virtual_time
async def test_verifiers_are_tried_again_after_pauses_that_double_to_a_limit() -> None:
    """Each between a half and the whole of it, by chance, so that sessions lost together do not return together."""
    one = seating(1)
    one.targets[0].open_error = UnavailableError("draining")
    with pytest.raises(UnavailableError, match="draining"):
        await one.open(waits_for_room=True)
    pauses = [after - before for (_, before), (_, after) in pairwise(one.asked)]
    longest = [min(FIRST_PAUSE_S * 2.0**place, LONGEST_PAUSE_S) for place in range(len(pauses))]
    assert all(pause <= most for pause, most in zip(pauses, longest, strict=True))
    assert all(2.0 * pause >= most for pause, most in zip(pauses[:-1], longest, strict=False)), "but the last"
    assert len(set(pauses)) == len(pauses) > 10
    assert now() == pytest.approx(LIMITS.failover_timeout_s)


@in_virtual_time
async def test_full_verifier_is_not_tried_before_half_of_the_time_it_named() -> None:
    one = seating(1)
    one.targets[0].open_error = NoRoomError("full", retry_after_s=6.0)
    with pytest.raises(NoRoomError, match="full"):
        await one.open(waits_for_room=True)
    pauses = [after - before for (_, before), (_, after) in pairwise(one.asked)]
    assert all(3.0 <= pause <= 6.0 for pause in pauses[:-1])
    assert 5 <= len(pauses) <= 10
    assert one.withdrawn == [at for _, at in one.asked], "it waits, and runs no rounds"


@in_virtual_time
async def test_session_that_is_accepted_was_not_withdrawn() -> None:
    one = seating(2)
    one.targets[0].open_error = NoRoomError("full", retry_after_s=6.0)
    await one.open(waits_for_room=False)
    assert one.withdrawn == []


@in_virtual_time
async def test_loss_that_is_not_the_verifiers_fault_moves_nothing() -> None:
    one = seating(2)
    await one.open(waits_for_room=False)
    with pytest.raises(InvalidRequestError, match="too long"):
        await one.move(InvalidRequestError("too long"))
    assert (one.seat.address, one.order, one.session.statistics.num_verifiers_lost) == ("target:1", ["target:1"], 0)


@in_virtual_time
async def test_opening_that_is_cancelled_is_closed() -> None:
    one = seating(1)
    (target,) = one.targets

    async def open_for_ever(spec: TargetSessionSpec, _: Any) -> None:
        target.attempts.append(spec)
        await asyncio.sleep(1_000.0)

    target.open = open_for_ever  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.open(waits_for_room=False), 1.0)
    assert (target.closed, one.seat.address) == ([(one.session.session_id, 0)], "")
