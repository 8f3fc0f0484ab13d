"""A head away from its target: what it drafts from features that come in parts, and what is asked for and refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduler_contract import SmallestPacer
from session_specs import draft_spec
from torch import Tensor
from toy_heads import ToyHead

from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.engine.admission import Room
from draftwire.engine.draft_session import DraftOption, DraftSession
from draftwire.errors import ProtocolViolationError
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.rounds import Calibration, CommittedTokens, DraftBlock, Fence, Permit, SendDrafted
from draftwire.options.heads.feature_feeding import FeatureFeeding
from draftwire.options.heads.feature_format import FeatureEncoding
from draftwire.options.heads.features import FeatureNeed, SessionFeatures
from draftwire.options.heads.fed_head import FedHeadDrafter
from draftwire.options.heads.head_drafter import HeadDrafter, HeadDrafting
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.scheduler import Scheduler

VOCAB_SIZE = 5
TEXT = [1, 2, 3, 4, 0, 2, 2, 1, 4, 3, 3, 0, 1, 1, 2, 4, 0, 3]
CONTEXT = 64
PERMIT = Permit(2, bytes(KEY_BYTES))


def table_of(head: ToyHead) -> Tensor:
    """Returns features of all positions of a text, of which float32 loses nothing."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(CONTEXT, head.size, generator=generator, dtype=torch.float32).double()


class Table:
    """Features of one text, all at once."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def features(self, spans: Any) -> Tensor:
        return torch.cat([self.rows[span.start : span.stop] for span in spans])


def need_of(head: ToyHead, window: int = CONTEXT) -> FeatureNeed:
    return FeatureNeed(b"f" * 32, FeatureEncoding.FLOAT32, head.size, window)


def request_of(round_number: int, num_tokens: int = 3, **changes: Any) -> DraftRequest:
    key = DrawKey(bytes(KEY_BYTES), 0, round_number)
    return DraftRequest(num_tokens, SamplingParams(), key, VOCAB_SIZE, prompt_len=4, **changes)


def parted(rows: Tensor, first: int, stop: int) -> SessionFeatures:
    return SessionFeatures(1, 0, first, stop - first, rows[first:stop].float().numpy().tobytes())


@pytest.mark.parametrize("reads_history", [True, False])
def test_fed_head_drafts_what_one_beside_the_target_does(reads_history: bool) -> None:
    """In whatever parts the features come, some of them ahead of the text and some of them twice."""
    local_head, fed_head = (ToyHead(VOCAB_SIZE, reads_history=reads_history, most_tokens=3) for _ in range(2))
    table = table_of(local_head)
    local = HeadDrafter(local_head, Table(table))
    beside = local.open()
    fed = FedHeadDrafter(fed_head, CONTEXT, need_of(fed_head))
    sequence = fed.open(TEXT[:4], ALONE)
    lengths, stop = (4, 5, 8, 9, 13, 13, 18), 0
    for number, length in enumerate(lengths):
        sequence.calibrate(len(sequence.ids), TEXT[len(sequence.ids) : length])
        drafting = Drafting(sequence, request_of(number))
        if stop < length - 1:
            assert fed.step([drafting]).drafts == [None], "features are missing"
        while stop < length - 1:
            first, stop = max(0, stop - number % 3), stop + 1 + number % 2
            fed.feed(sequence, parted(table, first, stop))
        (draft,) = fed.step([drafting]).drafts
        (expected,) = local.draft([HeadDrafting(beside, table, TEXT[:length], request_of(number))])
        assert isinstance(draft, Draft)
        assert draft == expected
        assert sequence.received is not None
        assert sequence.received.start == length - 2, "what was read is not kept"
    sequence.close()
    assert not fed_head.sequences


def test_head_that_begins_in_the_middle_knows_nothing_of_the_text_before() -> None:
    """As one that has read those pairs alone; penalties and the noise of places are of the whole text."""
    head = ToyHead(VOCAB_SIZE)
    table, first = table_of(head), 6
    fed = FedHeadDrafter(head, CONTEXT, need_of(head))
    sequence = fed.open(TEXT, ALONE)
    fed.feed(sequence, parted(table, first, len(TEXT) - 1))
    alone_head = ToyHead(VOCAB_SIZE)
    alone = HeadDrafter(alone_head, Table(table[first:]))
    for number in range(3):  # from the second time on, the last pair is read again
        (draft,) = fed.step([Drafting(sequence, request_of(number))]).drafts
        request = replace(request_of(number), prompt_len=0)
        (expected,) = alone.draft([HeadDrafting(alone.open(), table, TEXT[first:], request)])
        assert isinstance(draft, Draft)
        assert draft == expected
    assert not any(head.begins)
    assert all(alone_head.begins)
    fed.feed(sequence, parted(table, 30, 40))
    assert sequence.received is not None
    assert (sequence.received.head.first, len(head.sequences)) == (30, 1), "behind a gap it begins anew"


def test_block_that_is_cut_ends_after_the_token_that_is_being_drawn() -> None:
    head = ToyHead(VOCAB_SIZE)
    fed = FedHeadDrafter(head, CONTEXT, need_of(head))
    sequence = fed.open(TEXT, ALONE)
    fed.feed(sequence, parted(table_of(head), 0, len(TEXT) - 1))
    (whole,) = fed.step([Drafting(sequence, request_of(0))]).drafts
    (cut,) = fed.step([Drafting(sequence, request_of(0, is_cut=lambda: True))]).drafts
    assert isinstance(whole, Draft)
    assert isinstance(cut, Draft)
    assert cut.token_ids == whole.token_ids[:1]
    assert (whole.is_whole, cut.is_whole) == (True, False)


# What is asked for, and when a block waits


class Rig:
    """Scheduler and engine of a drafter with a head, in turn."""

    def __init__(self, window: int = CONTEXT) -> None:
        self.head = ToyHead(VOCAB_SIZE)
        self.table = table_of(self.head)
        self.need = need_of(self.head, window)
        strategy, options = FedHeadDrafter(self.head, CONTEXT, self.need), list[DraftOption]()
        self.engine = DraftEngine(strategy, options)
        self.feeding = FeatureFeeding(strategy, self.engine.sequences)
        options.append(self.feeding)
        self.scheduler = Scheduler(
            context_length=CONTEXT, max_draft_tokens=8, room=Room(8, 1024), pacer=SmallestPacer(), options=options
        )

    def open(self, text: list[int]) -> DraftSession:
        spec = draft_spec(token_ids=text, prompt_len=len(text), permit=PERMIT, max_len=CONTEXT, rule="block")
        session = self.scheduler.open(spec, 0)
        assert self.feeding.wanted(session) is None, "before its prompt is in place"
        assert self.run() == []
        return session

    def ask(self, session: DraftSession, number: int, new: list[int]) -> None:
        ids = [*session.committed.ids, *new]
        fence = Fence(*session.key, number, len(ids), CommittedTokens(ids).hash)
        self.scheduler.calibrate(Calibration(fence, len(ids) - len(new), new, 3))

    def run(self) -> list[DraftBlock]:
        blocks = []
        while (step := self.scheduler.next_step()) is not None:
            for done in self.scheduler.complete(step, self.engine.step(step)):
                blocks += [done.outcome] if isinstance(done.outcome, DraftBlock) else []
        return blocks

    def feed(self, session: DraftSession, first: int, stop: int) -> bool:
        features = replace(parted(self.table, first, stop), session_id=session.key[0], epoch=session.key[1])
        is_new = self.feeding.take(session, features)
        if is_new:
            self.feeding.feed(session.key, features)
            self.scheduler.resume(session)
        return is_new


def test_block_waits_for_the_features_of_its_text_and_nothing_runs_before() -> None:
    rig = Rig()
    session = rig.open(TEXT[:6])
    rig.ask(session, 0, [])
    request = rig.feeding.wanted(session)
    assert request is not None
    assert (request.first_position, request.limit, request.permit) == (0, 5 + CONTEXT, PERMIT)
    assert rig.scheduler.next_step() is None
    assert rig.feed(session, 0, 4)
    assert rig.run() == [], "one is missing"
    assert rig.feed(session, 4, 6), "and one is ahead of the text that is known"
    (block,) = rig.run()
    assert (len(block.token_ids), block.permit) == (3, PERMIT)
    rig.ask(session, 1, TEXT[6:7])
    (block,) = rig.run()
    assert block.fence.prefix_len == 7
    assert rig.feeding.wanted(session) is None, "enough was asked for"
    rig.ask(session, 2, TEXT[7:9])
    assert rig.run() == []
    rig.scheduler.send_drafted(SendDrafted(*session.key, 2))
    assert rig.feed(session, 6, 8)
    (block,) = rig.run()
    assert len(block.token_ids) == 1, "it was asked for as far as it is drawn"


def test_features_are_asked_for_as_the_text_goes_on_and_anew_behind_a_gap() -> None:
    rig = Rig(window=4)
    session = rig.open(TEXT[:10])
    rig.ask(session, 0, [])
    request = rig.feeding.wanted(session)
    assert request is not None
    assert (request.first_position, request.limit) == (5, 13), "the last ones, and as many ahead"
    rig.feed(session, 5, 9)
    rig.run()
    rig.ask(session, 1, TEXT[10:12])
    request = rig.feeding.wanted(session)
    assert request is not None
    assert (request.first_position, request.limit) == (None, 15)
    rig.ask(session, 2, TEXT[12:16])
    request = rig.feeding.wanted(session)
    assert request is not None
    assert (request.first_position, request.limit) == (11, 19)
    assert not rig.feed(session, 9, 11), "which were under way"
    assert rig.feed(session, 9, 15), "and of these some are new"
    assert len(rig.run()) == 1


@pytest.mark.parametrize("given", ["before", "gap", "beyond", "size"])
def test_features_that_were_not_asked_for_are_a_violation(given: str) -> None:
    """So nobody can make a drafter keep more than a window of each session."""
    rig = Rig(window=4)
    session = rig.open(TEXT[:10])
    if given != "before":
        rig.ask(session, 0, [])
        assert rig.feeding.wanted(session) is not None
    first, stop = {"before": (0, 1), "gap": (6, 8), "beyond": (5, 14), "size": (5, 6)}[given]
    features = replace(parted(rig.table, first, stop), session_id=session.key[0], epoch=session.key[1])
    if given == "size":
        features = replace(features, rows=features.rows[4:])
    with pytest.raises(ProtocolViolationError, match="features"):
        rig.feeding.take(session, features)


def test_features_of_a_session_that_is_closed_are_dropped() -> None:
    rig = Rig()
    session = rig.open(TEXT[:6])
    rig.ask(session, 0, [])
    rig.feeding.wanted(session)
    rig.feed(session, 0, 5)
    step = rig.scheduler.next_step()
    assert step is not None
    rig.scheduler.close(*session.key)
    rig.scheduler.complete(step, rig.engine.step(step))
    rig.engine.forget(session.key)
    rig.feeding.feed(session.key, parted(rig.table, 5, 6))
    assert not rig.head.sequences
    assert not rig.feeding._fed


def test_tokens_that_the_head_does_not_know_are_read_as_another_one() -> None:
    """A gateway, or a verifier, may name any id: the other sessions of a step draft all the same."""
    rig = Rig()
    session = rig.open([1, VOCAB_SIZE, 3])
    rig.ask(session, 0, [2, 2**32 - 1, 1])
    rig.feeding.wanted(session)
    rig.feed(session, 0, 5)
    (block,) = rig.run()
    assert len(block.token_ids) == 3
    assert session.committed.ids == [1, VOCAB_SIZE, 3, 2, 2**32 - 1, 1]


def test_text_of_one_token_waits_for_another() -> None:
    """There are no features of a token before it, and the scheduler knows that as the head does: no step runs."""
    rig = Rig()
    session = rig.open(TEXT[:1])
    rig.ask(session, 0, [])
    rig.feeding.wanted(session)
    assert rig.feed(session, 0, 2), "ahead of the text"
    assert rig.scheduler.next_step() is None
    rig.ask(session, 1, TEXT[1:2])
    assert len(rig.run()) == 1


def test_warm_up_runs_the_head() -> None:
    rig = Rig()
    rig.engine.warm_up()
    assert max(map(max, rig.head.readings)) > 1
    assert not rig.head.sequences
