"""A drafter that drafts for texts that a session may have next: what it sends, when, and what it frees.

Its model is a table, so that a block is the same to the bit however it was batched.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduler_contract import FixedPacer
from session_specs import draft_spec
from test_cut_blocks import TableModel

from draftwire.engine.admission import Room
from draftwire.engine.draft_session import DraftOption, Step
from draftwire.errors import ProtocolViolationError
from draftwire.method.ahead_limits import held_blocks
from draftwire.method.encoding import Claim, decode
from draftwire.method.round_parts import BranchLimits
from draftwire.method.rounds import (
    Calibration,
    CommittedTokens,
    DraftBlock,
    DraftSessionSpec,
    Fence,
    ReceivedBlock,
    RoundOutcome,
    SendDrafted,
)
from draftwire.models.cached_model import appended
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence
from draftwire.models.sequence_model import Reading
from draftwire.options.ahead.ahead_drafting import AheadDrafting
from draftwire.options.ahead.branch_drafter import BranchItem, BranchWork
from draftwire.options.ahead.forking_drafter import ForkingDrafter
from draftwire.options.ahead.held_blocks import HeldBlocks, HeldFate, HeldTally
from draftwire.requests.parameters import SamplingParams
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.scheduler import Scheduler
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

VOCAB = 12
PROMPT = [1, 2, 3]
LENGTH = 3
BRANCHES = 6
KEY = bytes(range(16))


class ForkingTable(TableModel):
    """A table whose sequences can be forked."""

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> torch.Tensor:
        with appended(self.cache, [reading.segment for reading in readings]):
            rows = [reading.token_ids[-1] for reading in readings if reading.keep]
            return self._logits[torch.tensor(rows, dtype=torch.int64)]

    def fork(self, sequence: CachedSequence, length: int) -> CachedSequence:
        return self.cache.fork(sequence, length)[0]

    def spoil(self, token: int, value: float) -> None:
        """Gives no distribution after a token any more: its logits are all the same value that is not finite."""
        self._logits[token] = value


def make_table(seed: int = 3) -> ForkingTable:
    generator = torch.Generator().manual_seed(seed)
    return ForkingTable(torch.softmax(2.0 * torch.randn(VOCAB + 1, VOCAB, generator=generator), dim=1))


class Rig:
    """A drafter's scheduler and engine, driven without an event loop, as its core does."""

    def __init__(self, **spec: Any) -> None:
        seconds = itertools.count(0, 1000)  # so long takes a round that every branch is worthwhile
        self.model = make_table()
        self.options = options = list[DraftOption]()
        drafter = ForkingDrafter(self.model, 4096)
        self.engine = DraftEngine(drafter, options)
        room, pacer = Room(8, 100_000), FixedPacer(tokens=1000)
        self.scheduler = Scheduler(context_length=4096, max_draft_tokens=8, room=room, pacer=pacer, options=options)
        self.outcomes, self.passes = Counter[str](), Counter[str]()
        post, count = (lambda call, *rest: call(*rest)), self.count
        self.ahead = AheadDrafting(drafter, self.engine.sequences, self.scheduler, post, count)
        self.ahead.lookahead.clock = lambda: next(seconds)
        self.branches = self.ahead.drafter.branches
        options.append(self.ahead)
        self.sent: list[DraftBlock] = []
        given = {"token_ids": PROMPT, "drafting_key": KEY, "ahead": BranchLimits(BRANCHES), "max_len": 400}
        self.spec: DraftSessionSpec = draft_spec(**(given | {"max_draft_tokens": 4, "target_vocab_size": VOCAB} | spec))
        self.scheduler.open(self.spec, 1)

    def run(self, most: int = 10**6) -> int:
        """Runs steps, as long as there are any; returns how many."""
        for count in range(most):
            step = self.scheduler.next_step()
            if step is None:
                return count
            self.finish(step)
        return most

    def finish(self, step: Step) -> None:
        """Runs a step."""
        for done in self.scheduler.complete(step, self.engine.step(step)):
            if isinstance(done.outcome, DraftBlock):
                self.sent.append(done.outcome)

    def count(self, outcome: str, num_branches: int, num_passes: int) -> None:
        self.outcomes[outcome] += num_branches
        self.passes[outcome] += num_passes

    def calibrate(self, text: "Text", base_len: int, **changes: Any) -> None:
        given: dict[str, Any] = {"max_rounds_ahead": 1, "num_draft_tokens": LENGTH} | changes
        ids = text.committed.ids
        self.scheduler.calibrate(Calibration(text.fence, base_len, ids[base_len:], **given))

    def tell(self, text: "Text", token_ids: list[int]) -> None:
        self.scheduler.learn(RoundOutcome(text.fence, token_ids))

    def blocks_of(self, number: int) -> list[DraftBlock]:
        return [block for block in self.sent if block.fence.round == number]


class Text:
    """What a session has committed."""

    def __init__(self, ids: list[int] = PROMPT) -> None:
        self.committed, self.round = CommittedTokens(ids), 0

    def commit(self, *token_ids: int) -> "Text":
        self.committed.append(list(token_ids))
        self.round += 1
        return self

    def copy(self) -> "Text":
        other = Text(self.committed.ids)
        other.round = self.round
        return other

    @property
    def fence(self) -> Fence:
        return Fence(1, 0, self.round, len(self.committed), self.committed.hash)


def begun(**spec: Any) -> tuple[Rig, Text]:
    """Returns a drafter that has sent the block of round 1 and drafted ahead, and the text before that round."""
    rig, text = Rig(**spec), Text().commit(4)
    rig.calibrate(text, len(PROMPT))
    rig.run()
    return rig, text


class Holding:
    """A verifier that holds the blocks of one session, and whose rounds end as they are told."""

    def __init__(self, rig: Rig, text: Text, most: int) -> None:
        self.rig, self.text = rig, text
        self.tally = HeldTally()
        self.held = HeldBlocks(self.tally, most)
        self.num_seen = 0
        self.largest = 0

    def receive(self) -> None:
        """Takes in what was sent since."""
        for block in self.rig.sent[self.num_seen :]:
            if block.fence.round > self.text.round:
                (draft,) = decode([Claim(block.token_ids, block.distributions)], VOCAB)
                self.held.add(ReceivedBlock(block.fence, block.token_ids, draft, True, 1, is_ahead=True))
        self.num_seen = len(self.rig.sent)
        self.largest = max(self.largest, len(self.held))

    def end_round(self, tokens: list[int]) -> bool:
        """Commits a round; returns whether the next one's block is held."""
        self.text.commit(*tokens)
        return self.held.take(self.text.fence) is not None


def text_of(block: DraftBlock, texts: list[Text]) -> Text:
    """Returns the one of some texts that a block is for."""
    (found,) = (text for text in texts if text.fence == block.fence)
    return found


def endings(rig: Rig, text: Text) -> list[Text]:
    """Returns all texts that the round of the last block may lead to."""
    block = next(block.token_ids for block in rig.sent if block.fence == text.fence)
    return [text.copy().commit(*block[:kept], token) for kept in range(len(block) + 1) for token in range(VOCAB)]


SAMPLINGS = {
    "sampled": {},
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "cut": {"sampling": SamplingParams(temperature=0.8, top_k=4)},
    "penalised": {"sampling": SamplingParams(presence_penalty=1.5, repetition_penalty=1.3)},
    "coupled": {"rule": "coupled"},
    "biased": {"sampling": SamplingParams(logit_bias=((5, 2.0),))},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_block_is_the_same_whether_it_was_drafted_ahead_or_requested(name: str) -> None:
    """So hits and misses change nothing: a miss draws again with the same numbers, and nothing was done with them."""
    rig, text = begun(**SAMPLINGS[name])
    ahead = rig.blocks_of(2)
    assert len(ahead) == BRANCHES
    for block in ahead:
        longer = text_of(block, endings(rig, text))
        strict = Rig(**SAMPLINGS[name], ahead=None)
        strict.calibrate(text, len(PROMPT), max_rounds_ahead=0)
        strict.run()
        strict.calibrate(longer, len(text.committed), max_rounds_ahead=0)
        strict.run()
        (requested,) = strict.blocks_of(2)
        assert (block.token_ids, block.distributions) == (requested.token_ids, requested.distributions)


def test_likeliest_endings_are_drafted_for_and_none_twice() -> None:
    rig, text = begun()
    texts = [text_of(block, endings(rig, text)).committed.ids for block in rig.blocks_of(2)]
    assert len({tuple(ids) for ids in texts}) == BRANCHES
    block = rig.blocks_of(1)[0].token_ids
    whole = [ids for ids in texts if ids[: len(text.committed) + LENGTH] == [*text.committed.ids, *block]]
    assert whole, "that the whole block is accepted is likely"
    rejected = [ids for ids in texts if ids not in whole]
    assert rejected, "so is that one of its tokens is not"
    for ids in rejected:
        kept = ids[len(text.committed) : -1]
        assert ids[-1] != block[len(kept)], "the rejected token is not what follows"


def test_text_that_came_true_is_not_drafted_for_again_and_goes_on() -> None:
    rig, text = begun()
    block = rig.blocks_of(2)[0]
    longer = text_of(block, endings(rig, text))
    rig.calibrate(longer, len(text.committed))
    rig.run()
    assert rig.blocks_of(2).count(block) == 1
    assert len(rig.blocks_of(2)) == BRANCHES
    assert len(rig.blocks_of(3)) == BRANCHES, "the next round is drafted for"
    assert rig.outcomes["hit"] == 1
    assert rig.outcomes["missed"] == BRANCHES - 1


def test_other_text_is_drafted_for_when_it_is_requested() -> None:
    rig, text = begun()
    known = {block.fence for block in rig.sent}
    missed = next(one for one in endings(rig, text) if one.fence not in known)
    rig.calibrate(missed, len(text.committed))
    assert rig.run(1) == 1
    assert rig.sent[-1].fence == missed.fence


def test_outcome_has_the_next_block_drafted_before_the_calibration() -> None:
    rig, text = begun()
    known = {block.fence for block in rig.sent}
    missed = next(one for one in endings(rig, text) if one.fence not in known)
    rig.tell(missed, missed.committed.ids[len(text.committed) :])
    rig.run()
    assert [block.fence for block in rig.blocks_of(2)].count(missed.fence) == 1
    assert not rig.blocks_of(3), "no further than one round beyond the calibration"
    before = len(rig.sent)
    rig.calibrate(missed, len(text.committed))
    rig.run()
    assert rig.sent[before:] == rig.blocks_of(3)
    assert len(rig.blocks_of(3)) == BRANCHES


def test_false_outcome_is_left_to_the_calibration() -> None:
    rig, text = begun()
    longer = text.copy().commit(5)
    wrong = [
        RoundOutcome(replace(longer.fence, prefix_hash=longer.fence.prefix_hash ^ 1), [5]),
        RoundOutcome(replace(longer.fence, prefix_len=longer.fence.prefix_len + 1), [5]),
        RoundOutcome(longer.fence, []),
        RoundOutcome(replace(longer.fence, session_id=7), [5]),
        RoundOutcome(text.fence, [4]),
        *(RoundOutcome(text.copy().commit(*ids).fence, ids) for ids in ([5] * 6, [5] * 400)),
    ]
    for outcome in wrong:
        rig.scheduler.learn(outcome)
    assert rig.scheduler.sessions[1, 0].committed.ids == text.committed.ids
    assert rig.scheduler.dropped == {"outcome": 5, "unknown_session": 1, "stale": 1}
    rig.calibrate(longer, len(text.committed))
    rig.run(1)
    assert rig.sent[-1].fence == longer.fence


def test_calibration_that_contradicts_an_outcome_is_a_violation() -> None:
    rig, text = begun()
    rig.tell(text.copy().commit(5), [5])
    with pytest.raises(ProtocolViolationError):
        rig.calibrate(text.copy().commit(6), len(text.committed))


@pytest.mark.parametrize("rounds_ahead", [0, 1])
def test_session_goes_on_at_an_outcome_as_far_as_its_calibration_lets_it(rounds_ahead: int) -> None:
    rig, text = Rig(ahead=None), Text().commit(4)
    rig.calibrate(text, len(PROMPT), max_rounds_ahead=rounds_ahead)
    rig.run()
    longer = text.copy().commit(5)
    rig.tell(longer, [5])
    rig.run()
    assert len(rig.blocks_of(2)) == rounds_ahead, "nothing is drafted before the outcome"
    rig.calibrate(longer, len(text.committed), max_rounds_ahead=0)
    rig.run()
    strict = Rig(ahead=None)
    strict.calibrate(text, len(PROMPT), max_rounds_ahead=0)
    strict.run()
    strict.calibrate(longer, len(text.committed), max_rounds_ahead=0)
    strict.run()
    (block,), (same,) = rig.blocks_of(2), strict.blocks_of(2)
    assert replace(block, timings=same.timings) == same


@pytest.mark.parametrize("is_added_late", [False, True])
def test_outcome_before_its_calibration_has_the_next_block_drafted_at_it(is_added_late: bool) -> None:
    """Also if drafting ahead is added in between, for another session."""
    rig, text = Rig(ahead=None), Text().commit(4)
    if is_added_late:
        rig.options.remove(rig.ahead)
    rig.calibrate(text, len(PROMPT))
    rig.run()
    second = text.copy().commit(5)
    rig.tell(second, [5])
    rig.run()
    third = second.copy().commit(6)
    rig.tell(third, [6])  # of the round that is asked for below
    rig.run()
    assert rig.blocks_of(2)
    assert not rig.blocks_of(3), "no calibration lets it go so far"
    if is_added_late:
        rig.options.append(rig.ahead)
    rig.calibrate(second, len(text.committed))
    rig.run()
    assert len(rig.blocks_of(3)) == 1
    rig.calibrate(third, len(second.committed), max_rounds_ahead=0)
    rig.run()
    assert [block.fence.round for block in rig.sent] == [1, 2, 3]


def test_outcome_beyond_the_longest_text_is_left_to_the_calibration() -> None:
    rig, text = begun(max_len=8)
    for ids, is_dropped in (([5, 5, 5, 5, 5], True), ([5, 5, 5, 5], False)):
        rig.scheduler.learn(RoundOutcome(text.copy().commit(*ids).fence, ids))
        assert rig.scheduler.dropped["outcome"] == 1
        assert (rig.scheduler.sessions[1, 0].committed.ids == text.committed.ids) is is_dropped


def ahead_in(step: Step) -> Sequence[BranchItem]:
    """Returns the branches of a step."""
    return step.spare.items if isinstance(step.spare, BranchWork) else ()


def drafting_further() -> tuple[Rig, Text, Step, Text]:
    """Returns a drafter in a step for round 3, the text before round 1, the step, and one that round 3 may have."""
    rig, text = Rig(), Text().commit(4)
    rig.calibrate(text, len(PROMPT), max_rounds_ahead=2)
    while (step := rig.scheduler.next_step()) is not None:
        ahead = ahead_in(step)
        if ahead and ahead[0].parent is not None and ahead[0].branch.fence.round == 3:
            branch = ahead[0].branch
            assert branch.parent is not None
            text_of_3 = text.copy().commit(*branch.parent.added).commit(*branch.added)
            assert text_of_3.fence == branch.fence
            return rig, text, step, text_of_3
        rig.finish(step)
    raise AssertionError("it goes two rounds ahead")


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_branch_that_comes_true_while_drafted_is_alone_in_the_cache(is_asked: bool, goes_on: bool) -> None:
    """Also if nobody asks for its block: its sequence is the session's, whatever the text has become since."""
    rig, text, step, last = drafting_further()
    branch = ahead_in(step)[0].branch
    assert branch.parent is not None
    rig.tell(text.commit(*branch.parent.added), branch.parent.added)
    rig.calibrate(text, len(text.committed) - len(branch.parent.added), max_rounds_ahead=int(is_asked))
    rig.tell(last, branch.added)
    if goes_on:
        rig.tell(last.commit(7), [7])
    rig.finish(step)
    assert not rig.branches
    rig.calibrate(last, len(text.committed), max_rounds_ahead=0)
    rig.run()
    assert [block.fence for block in rig.sent].count(last.fence) == 1
    assert len(rig.model.cache.sequences) == 1 + len(rig.branches)
    strict = Rig(ahead=None)
    strict.calibrate(last, len(PROMPT), max_rounds_ahead=0)
    strict.run()
    assert next(block for block in rig.sent if block.fence == last.fence).token_ids == strict.sent[0].token_ids


def test_step_that_fails_is_not_repeated() -> None:
    """No session fails with it: nobody has asked."""
    rig, text = Rig(), Text().commit(4)
    rig.calibrate(text, len(PROMPT), max_rounds_ahead=2)
    rig.run(2)
    num_failed = 0
    while (step := rig.scheduler.next_step()) is not None:
        assert ahead_in(step)
        rig.scheduler.abandon(step)
        num_failed += 1
        assert num_failed <= 2, "reading on, and drafting if that was done before"
    longer = text.copy().commit(5)
    rig.calibrate(longer, len(text.committed))
    rig.run(1)
    assert rig.sent[-1].fence == longer.fence, "what is asked for is drafted"


def test_branch_that_is_asked_for_in_a_step_that_fails_is_drafted_again() -> None:
    rig, text = Rig(), Text().commit(4)
    rig.calibrate(text, len(PROMPT))
    rig.run(3)
    step = rig.scheduler.next_step()
    assert step is not None
    longer = text.copy().commit(*ahead_in(step)[0].branch.added)
    rig.calibrate(longer, len(text.committed))
    rig.scheduler.abandon(step)
    rig.run(1)
    assert rig.sent[-1].fence == longer.fence


def test_step_has_no_more_rows_than_sessions_may_be_open() -> None:
    """So many were tried when the cache was sized."""
    rig, text = Rig(), Text().commit(4)
    rig.scheduler.room.max_sessions = 4
    rig.calibrate(text, len(PROMPT))
    sizes = []
    while (step := rig.scheduler.next_step()) is not None:
        sizes.append(sum(not item.reads_on for item in ahead_in(step)))
        rig.finish(step)
    assert sizes == [0, 0, 0, 4, BRANCHES - 4]
    assert len(rig.blocks_of(2)) == BRANCHES


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_drafter_goes_so_many_rounds_ahead_and_no_further(rounds: int) -> None:
    rig, text = Rig(), Text().commit(4)
    rig.calibrate(text, len(PROMPT), max_rounds_ahead=rounds)
    rig.run()
    assert {block.fence.round for block in rig.sent} == set(range(1, rounds + 2))
    assert len(rig.sent) <= 1 + BRANCHES


@pytest.mark.parametrize(("rounds", "seed"), [(1, 0), (2, 1), (2, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("is_spacious", [False, True])
def test_verifier_is_sent_no_more_than_it_holds(rounds: int, seed: int, is_spacious: bool) -> None:
    """A round leaves blocks behind that continue another text than its own. One that there were no room for would be
    missed later: its drafter has sent it, and the verifier does not have it.
    """
    chance = random.Random(seed)
    most = held_blocks(BRANCHES, rounds) if is_spacious else BRANCHES
    rig = Rig(ahead=BranchLimits(BRANCHES, most if is_spacious else 0))
    holding = Holding(rig, Text().commit(4), most)
    base_len, num_hits, num_expected = len(PROMPT), 0, 0
    for _ in range(40):
        rig.calibrate(holding.text, base_len, max_rounds_ahead=rounds)
        base_len = len(holding.text.committed)
        rig.run()
        holding.receive()
        prepared = {block.fence for block in rig.blocks_of(holding.text.round + 1)}
        foreseen = [text for text in endings(rig, holding.text) if text.fence in prepared]
        ending = chance.choice(foreseen if foreseen and chance.random() < 0.9 else endings(rig, holding.text))
        tokens = ending.committed.ids[base_len:]
        num_expected += ending.fence in prepared
        assert len(foreseen) == BRANCHES // rounds or not is_spacious, "none waits for room"
        num_hits += holding.end_round(tokens)
        rig.tell(holding.text, tokens)
    assert holding.tally.fates[HeldFate.NO_ROOM] == 0
    assert holding.largest <= most
    assert num_hits == num_expected >= 20, "what was sent is there"
    if is_spacious:
        assert rounds == 1 or holding.largest > BRANCHES


def test_passes_of_branches_are_counted_by_what_became_of_them() -> None:
    """One for each token of each branch: those of texts that did not come true were wasted."""
    rig, text = begun()
    longer = text_of(rig.blocks_of(2)[0], endings(rig, text))
    rig.calibrate(longer, len(text.committed), max_rounds_ahead=0)
    rig.run()
    assert rig.passes == {"hit": LENGTH, "missed": (BRANCHES - 1) * LENGTH}
    rig.calibrate(longer.copy().commit(5), len(longer.committed), max_rounds_ahead=1)
    rig.run(2)  # the block, and what may follow it
    step = rig.scheduler.next_step()
    assert step is not None
    rig.scheduler.open(replace(rig.spec, session_id=2), 1)
    rig.scheduler.complete(step, rig.engine.step(step))
    assert rig.passes["abandoned"] == BRANCHES, "each was cut after one token"
    rig.run(1)  # the other's prompt
    step = rig.scheduler.next_step()
    assert step is not None
    rig.scheduler.close(1, 0)
    rig.scheduler.complete(step, rig.engine.step(step))
    assert rig.passes["abandoned"] == 2 * BRANCHES, "so are those of a session that is closed"


def test_texts_end_where_the_session_does_or_at_a_stop_token() -> None:
    rig, _ = begun(max_len=len(PROMPT) + 1 + LENGTH + 2)
    for block in rig.blocks_of(2):
        assert block.fence.prefix_len + len(block.token_ids) < rig.spec.max_len, "one token is left for the verifier"
    everything = frozenset(range(VOCAB))
    assert not begun(stop_token_ids=everything)[0].blocks_of(2)


def test_what_is_requested_ends_what_nobody_asked_for() -> None:
    """Cut blocks are not sent, and are drafted anew when they are wanted: time alone has decided on them."""
    rig, text = Rig(), Text().commit(4)
    rig.calibrate(text, len(PROMPT))
    rig.run(3)  # the prompt, the block, and what may follow it
    step = rig.scheduler.next_step()
    assert step is not None
    assert len(ahead_in(step)) == BRANCHES
    rig.scheduler.open(replace(rig.spec, session_id=2), 1)
    result = rig.engine.step(step)
    assert all(item.draft is None for item in ahead_in(step))
    assert rig.scheduler.complete(step, result) == []
    rig.run()
    assert len(rig.blocks_of(2)) == BRANCHES
    assert rig.outcomes["abandoned"] == BRANCHES


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("branches", [1, BRANCHES])
def test_block_that_ends_before_a_bad_row_is_sent_and_not_drafted_again(value: float, branches: int) -> None:
    """Time has not cut it: there is nothing to try again until the verdict."""
    healthy, text = begun(ahead=BranchLimits(branches))
    lasts = {block.fence: text_of(block, endings(healthy, text)).committed.ids[-1] for block in healthy.blocks_of(2)}
    num_short = 0
    for token in range(VOCAB):
        rig = Rig(ahead=BranchLimits(branches))
        rig.calibrate(text, len(PROMPT))
        rig.run(3)  # the prompt, the block, and what may follow it
        rig.model.spoil(token, value)
        assert rig.run(20) == 1, "as many steps as without"
        expected = {
            block.fence: block.token_ids[: (*block.token_ids, token).index(token) + 1]
            for block in healthy.blocks_of(2)
            if lasts[block.fence] != token  # of others not even the first token can be drawn
        }
        assert {block.fence: block.token_ids for block in rig.blocks_of(2)} == expected
        assert len(rig.blocks_of(2)) == len(expected)
        num_short += sum(len(token_ids) < LENGTH for token_ids in expected.values())
    assert num_short >= branches


def test_branch_that_is_requested_while_it_is_drafted_is_finished() -> None:
    rig, text = Rig(), Text().commit(4)
    rig.calibrate(text, len(PROMPT))
    rig.run(3)
    step = rig.scheduler.next_step()
    assert step is not None
    wanted = text_of(DraftBlock(ahead_in(step)[1].branch.fence, [], None), endings(rig, text))  # type: ignore[arg-type]
    rig.calibrate(wanted, len(text.committed))
    rig.scheduler.open(replace(rig.spec, session_id=2), 1)  # others wait
    completed = rig.scheduler.complete(step, rig.engine.step(step))
    (block,) = (done.outcome for done in completed if done.outcome is not None)
    assert isinstance(block, DraftBlock)
    assert (block.fence, len(block.token_ids)) == (wanted.fence, LENGTH)
    assert not rig.scheduler.sessions[1, 0].queued
    rig.run()
    assert wanted.fence not in {sent.fence for sent in rig.sent}, "it is not drafted again"


def test_branch_that_is_requested_as_drawn_is_sent_though_it_was_cut() -> None:
    rig, text = Rig(), Text().commit(4)
    rig.calibrate(text, len(PROMPT))
    rig.run(3)
    step = rig.scheduler.next_step()
    assert step is not None
    wanted = text_of(DraftBlock(ahead_in(step)[1].branch.fence, [], None), endings(rig, text))  # type: ignore[arg-type]
    rig.calibrate(wanted, len(text.committed), max_rounds_ahead=0)
    assert not rig.scheduler.send_drafted(SendDrafted(1, 0, wanted.round)), "it is not sent yet"
    rig.finish(step)
    assert [(block.fence, len(block.token_ids)) for block in rig.blocks_of(2)] == [(wanted.fence, 1)]
    assert rig.run(20) == 0, "it is not drafted again"


def test_full_cache_leaves_branches_out() -> None:
    rig, text = Rig(), Text().commit(4)
    rig.calibrate(text, len(PROMPT))
    rig.run(3)
    filler = rig.model.cache.open()
    rig.model.cache.append(filler, rig.model.cache.num_free_blocks * BLOCK_SIZE)
    rig.run()
    assert not rig.blocks_of(2)
    rig.model.cache.close(filler)
    longer = text.copy().commit(7)
    rig.calibrate(longer, len(text.committed))
    rig.run(1)
    assert rig.sent[-1].fence == longer.fence


@pytest.mark.parametrize("seed", range(12))
def test_every_requested_round_has_one_block_and_nothing_is_left_over(seed: int) -> None:
    """Outcomes and calibrations come at random, in and between steps, and rounds end at random."""
    chance = random.Random(seed)
    rig, text = Rig(**chance.choice(list(SAMPLINGS.values()))), Text()
    base_len, wanted = len(PROMPT), []
    text.commit(4)
    step: Step | None = None
    for _ in range(25):
        rig.calibrate(text, base_len, max_rounds_ahead=chance.choice([0, 1, 2, 2]))
        base_len = len(text.committed)
        wanted.append(text.fence)
        if step is None:
            rig.run(chance.choice([0, 1, 2, 3, 10]))
            step = rig.scheduler.next_step() if chance.random() < 0.5 else None
        if text.fence not in {block.fence for block in rig.sent} and step is None:
            rig.run(1)
        sent = [block.token_ids for block in rig.sent if block.fence == text.fence]
        block = sent[0] if sent else []
        kept = chance.randrange(len(block) + 1)
        tokens = [*block[:kept], chance.randrange(VOCAB)]
        text.commit(*tokens)
        if chance.random() < 0.5:
            rig.tell(text, tokens)
        if step is not None and chance.random() < 0.6:
            rig.finish(step)
            step = None
        check_integrity(rig.model.cache)
    rig.calibrate(text, base_len, max_rounds_ahead=1)
    if step is not None:
        rig.finish(step)
    rig.run()
    counts = Counter(block.fence for block in rig.sent)
    assert set(counts.values()) == {1}, "a text gets one block of a round at most"
    assert counts[text.fence] == 1
    assert rig.scheduler.close(1, 0) is not None
    rig.engine.forget((1, 0))
    assert not rig.model.cache.sequences
