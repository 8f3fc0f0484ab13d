"""Blocks of coming rounds at the verifier: which are held, which come true, and what drops them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from scheduler_contract import PROMPT
from test_verifier_scheduler import (
    DRAFTER,
    OTHER,
    STOP_TOKEN,
    Engine,
    accept_all,
    first_fence,
    make_block,
    make_scheduler,
    make_spec,
    offer,
    permit,
)

from draftwire.engine.target_session import StepItem, TargetSession
from draftwire.errors import BlockViolationError, DraftwireError, Violation
from draftwire.method.ahead_limits import MAX_ROUNDS_AHEAD
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import CommittedTokens, Fence, PlainRun, ReceivedBlock, Verdict
from draftwire.options.ahead.held_blocks import HeldFate
from draftwire_verifier.scheduler import Scheduler
from tests.unit.verdict_parts import ahead_of

HELD = 3


class Rig:
    """A scheduler with one session that holds blocks, whose first block is queued."""

    def __init__(self, **changes: Any) -> None:
        self.scheduler: Scheduler = make_scheduler()
        self.tally = self.scheduler.hold.args[0]
        self.session: TargetSession = self.scheduler.open(make_spec(**({"max_held_blocks": HELD} | changes)), 1)
        self.engine = Engine()
        offer(self.scheduler, make_block(first_fence()))

    def ahead(self, added: list[int], rounds: int = 1, **changes: Any) -> ReceivedBlock:
        """A block for the text that becomes longer by these tokens in so many rounds."""
        text = CommittedTokens([*self.session.committed.ids, *added])
        fence = Fence(1, 0, self.session.round + rounds, len(text), text.hash)
        return make_block(fence, **({"permit": None, "is_ahead": True} | changes))

    @property
    def fates(self) -> Counter[HeldFate]:
        """Blocks that were drafted ahead, by what became of them."""
        return self.tally.fates

    def step(self, *tokens: int) -> Verdict:
        """Has a round commit tokens, or all of its block."""
        step = self.scheduler.next_step()
        assert step is not None

        def decide(item: StepItem) -> list[int] | DraftwireError:
            return list(tokens) or accept_all(item)

        ((_, verdict),) = self.scheduler.complete(step, self.engine.run(step, decide))
        assert isinstance(verdict, Verdict)
        return verdict


def fate_of(verdict: Verdict) -> tuple[bool, int, int]:
    ahead = ahead_of(verdict)
    return ahead.is_ahead, ahead.num_wasted_draft_tokens, ahead.held_bytes


def test_block_whose_text_comes_true_is_judged_without_being_requested() -> None:
    rig = Rig()
    offer(rig.scheduler, rig.ahead([10, 11, 20], token_ids=[30, 31]))
    offer(rig.scheduler, rig.ahead([10, 11, 21], token_ids=[40]))
    assert rig.scheduler.num_kept == 2
    assert ahead_of(rig.step()).next_is_held
    assert rig.session.block is not None
    assert rig.session.block.token_ids == [30, 31]
    assert rig.fates == {HeldFate.HIT: 1, HeldFate.MISSED: 1}
    assert (len(rig.session.pushed), rig.tally.num_bytes) == (0, 0)
    verdict = rig.step()
    assert (verdict.token_ids, verdict.num_draft_tokens, ahead_of(verdict).next_is_held) == ([30, 31, 20], 2, False)
    assert rig.scheduler.next_step() is None


def test_other_text_drops_all_that_were_held_for_its_round() -> None:
    rig = Rig()
    offer(rig.scheduler, rig.ahead([10, 11, 20]))
    offer(rig.scheduler, rig.ahead([10, 11, 20, 5], rounds=2))
    assert not ahead_of(rig.step(10, 50)).next_is_held
    assert rig.scheduler.next_step() is None
    assert (rig.fates, len(rig.session.pushed)) == ({HeldFate.MISSED: 1}, 1), "one is for a round that is still to come"
    offer(rig.scheduler, make_block(rig.session.fence, permit=None))
    rig.step(10, 51)
    assert (rig.fates, len(rig.session.pushed)) == ({HeldFate.MISSED: 2}, 0)


def test_block_after_its_verdict_is_taken_or_dropped_without_violation() -> None:
    rig = Rig()
    right, wrong = rig.ahead([10, 11, 20]), rig.ahead([10, 11, 21])
    rig.step()
    offer(rig.scheduler, wrong)
    assert rig.fates == {HeldFate.STALE: 1}
    assert rig.scheduler.next_step() is None
    offer(rig.scheduler, right)
    verdict = rig.step()
    assert (verdict.num_draft_tokens, ahead_of(verdict).is_ahead, ahead_of(verdict).num_wasted_draft_tokens) == (
        2,
        True,
        2,
    )
    assert rig.fates == {HeldFate.STALE: 1, HeldFate.LATE: 1}
    offer(rig.scheduler, wrong)
    assert rig.fates[HeldFate.STALE] == 2, "of a round that is over"


def test_held_bytes_and_wasted_tokens_are_told() -> None:
    rig = Rig()
    right, wrong = rig.ahead([10, 11, 20], token_ids=[30, 31]), rig.ahead([10, 11, 21], token_ids=[40])
    later = rig.ahead([10, 11, 20, 30], rounds=2, token_ids=[7])
    assert right.num_bytes > wrong.num_bytes > 8, "tokens and distributions"
    for block in (right, wrong, later):
        offer(rig.scheduler, block)
    assert rig.tally.num_bytes == right.num_bytes + wrong.num_bytes + later.num_bytes
    verdict = rig.step()
    assert fate_of(verdict) == (
        False,
        1,
        later.num_bytes,
    )
    verdict = rig.step(30, 50)
    assert fate_of(verdict) == (
        True,
        1,
        0,
    )
    rig.scheduler.run_plain(PlainRun(rig.session.fence, 1))
    assert ahead_of(rig.step(51)).num_wasted_draft_tokens == 0, "each is told once"


def test_first_blocks_are_kept_whatever_is_in_them() -> None:
    """A later one for the same text is dropped, and one beyond the bound: by order of arrival alone."""
    for largest in range(HELD + 1):
        rig = Rig()
        blocks = [
            rig.ahead([10, 11, token], token_ids=[1, 2, 3] if token == largest else [1]) for token in range(HELD + 1)
        ]
        for block in blocks:
            offer(rig.scheduler, block)
        offer(rig.scheduler, rig.ahead([10, 11, 0], token_ids=[9]))
        assert rig.fates == {HeldFate.NO_ROOM: 1, HeldFate.REPEATED: 1}
        assert ahead_of(rig.step(10, 11, HELD)).next_is_held is False, "there was no room for the last"
        other = Rig()
        for block in blocks:
            offer(other.scheduler, block)
        assert ahead_of(other.step(10, 11, 0)).next_is_held
        assert other.session.block is blocks[0]


def test_session_that_holds_nothing_takes_a_coming_round_for_a_violation() -> None:
    rig = Rig(max_held_blocks=0)
    with pytest.raises(BlockViolationError) as caught:
        offer(rig.scheduler, rig.ahead([10, 11, 20]))
    assert caught.value.violation is Violation.PREFIX
    rig.step()
    with pytest.raises(BlockViolationError):
        offer(rig.scheduler, replace(rig.ahead([]), fence=replace(rig.session.fence, prefix_hash=1)))


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"rounds": MAX_ROUNDS_AHEAD + 1}, Violation.PREFIX),
        ({"drafter_id": OTHER}, Violation.PEER),
        ({"token_ids": [1, 2, 3, 4]}, Violation.LENGTH),
        ({"encoding": Encoding.NONE}, Violation.NO_DISTRIBUTIONS),
        ({"draft": BlockViolationError(Violation.ENCODING, "no")}, Violation.ENCODING),
    ],
)
def test_block_of_a_coming_round_that_breaks_the_protocol_is_refused(
    changes: dict[str, Any], violation: Violation
) -> None:
    rig = Rig()
    draft = changes.pop("draft", None)
    block = rig.ahead([10, 11, 20], **changes)
    with pytest.raises(BlockViolationError) as caught:
        offer(rig.scheduler, block if draft is None else replace(block, draft=draft))
    assert caught.value.violation is violation
    assert not rig.session.pushed


def test_block_beyond_the_end_of_the_session_is_refused() -> None:
    rig = Rig(max_len=len(PROMPT) + 6)
    with pytest.raises(BlockViolationError) as caught:
        offer(rig.scheduler, rig.ahead([10, 11, 20, 21, 22, 23, 24, 25]))
    assert caught.value.violation is Violation.LENGTH


@pytest.mark.parametrize("ends", ["another drafter", "end of speculation", "close"])
def test_what_a_drafter_sent_ends_with_it(ends: str) -> None:
    rig = Rig()
    offer(rig.scheduler, rig.ahead([10, 11, 20]))
    match ends:
        case "another drafter":
            offer(rig.scheduler, rig.ahead([], rounds=0, drafter_id=OTHER, permit=permit(1)))
            assert rig.session.drafter_id == OTHER
        case "end of speculation":
            rig.scheduler.end_speculation(rig.session)
        case _:
            rig.scheduler.close(1, 0)
            assert rig.scheduler.next_step() is None
            assert (rig.fates, rig.tally.num_bytes) == ({HeldFate.ENDED: 1}, 0)
            return
    assert (rig.fates[HeldFate.ENDED], len(rig.session.pushed), rig.tally.num_bytes) == (1, 0, 0)
    assert not ahead_of(rig.step()).next_is_held


def test_nothing_is_judged_after_a_stop_token_or_in_a_plain_run() -> None:
    rig = Rig()
    offer(rig.scheduler, rig.ahead([10, STOP_TOKEN]))
    assert not ahead_of(rig.step(10, STOP_TOKEN)).next_is_held
    assert rig.fates == {HeldFate.MISSED: 1}
    rig = Rig()
    rig.step()
    rig.scheduler.run_plain(PlainRun(rig.session.fence, 2))
    offer(rig.scheduler, rig.ahead([20]))
    verdict = rig.step(20)
    assert (ahead_of(verdict).next_is_held, verdict.plain_rounds_left) == (False, 1)
    assert (rig.session.block, rig.fates) == (None, {HeldFate.MISSED: 1})


def test_drafter_of_another_session_cannot_hold_blocks_here() -> None:
    rig = Rig()
    block = rig.ahead([10, 11, 20], drafter_id=DRAFTER)
    offer(rig.scheduler, replace(block, fence=replace(block.fence, session_id=2)))
    assert not rig.session.pushed
    assert rig.scheduler.dropped["unknown_session"] == 1
