"""Blocks end before a place of which the drafter is not sure, by its row alone, and say how sure it was of each place.

That the texts keep the target's law is enumerated in `test_law_of_services.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from session_specs import draft_spec, salted
from test_cut_blocks import FuzzyTableModel, TableModel
from torch import Tensor

from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.engine.admission import Room
from draftwire.engine.draft_session import DraftSession
from draftwire.engine.prefill import PrefillPacer
from draftwire.errors import InvalidRequestError, ProtocolViolationError, UnavailableError
from draftwire.method.confidence import MEASURED_EVERY, NUM_BUCKETS, bucket_of, check_buckets, check_stop, stop_in
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import DrawKey
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.rounds import Calibration, DraftTree, Fence, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.models.description import CONFIDENCE
from draftwire.models.kv_cache import CachedSequence
from draftwire.options.ahead.branches import WantedGuesses
from draftwire.options.ahead.forking_drafter import ForkingDrafter
from draftwire.options.confidence import confident_chains
from draftwire.options.confidence.bucket_counts import BucketCounts, PlaceFate
from draftwire.options.confidence.confident_chains import confidence_of
from draftwire.options.confidence.session_confidence import SessionConfidence
from draftwire.requests.parameters import SamplingParams
from draftwire_drafter.scheduler import Scheduler
from draftwire_gateway.options.confident_drafts import ConfidentDrafts
from draftwire_gateway.session.policy import Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes, RoundWatch, WhyPlain
from draftwire_gateway.session.session_option import BlockRequest
from draftwire_verifier.drafter_peers import DrafterPeers

torch.set_num_threads(1)

VOCAB = 7
KEY = bytes(range(16))
FENCE = Fence(1, 1, 16, 3, 0)
SPEC = draft_spec(token_ids=[1, 2, 3])
SAMPLED = SamplingParams()
SHARP = SamplingParams(0.1, top_k=2, top_p=0.5, presence_penalty=1.0)
STOPS = (0.33, 0.45, 0.55, 0.9)
EVERYWHERE = (0.0, *STOPS, 1.0)


class CountedTable(TableModel):
    """A table that notes how many sequences each pass extends."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.passes: list[int] = []

    def extend(
        self, sequences: Sequence[CachedSequence], token_ids: Tensor, parents: Sequence[tuple[int, ...]] = ()
    ) -> Tensor:
        self.passes.append(len(sequences))
        return super().extend(sequences, token_ids, parents)


@pytest.fixture
def table() -> Tensor:
    """Some rows are surer than others."""
    return (1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))).softmax(dim=1)


@pytest.fixture
def drafter(table: Tensor) -> ForkingDrafter:
    return ForkingDrafter(CountedTable(table), 64, quantization=Quantization(Encoding.DENSE_FLOAT32))  # type: ignore[arg-type]


def request(stop_below: float | None, number: int = 0, num_tokens: int = 6, **changes: object) -> DraftRequest:
    wanted = DraftRequest(num_tokens, SAMPLED, DrawKey(KEY, 0, number), VOCAB, stop_below=stop_below)
    return replace(wanted, **changes)  # type: ignore[arg-type]


def drafted(drafter: ForkingDrafter, *requests: DraftRequest, start: int = 1) -> list[Draft]:
    sequences = [drafter.open([start], salted(str(place))) for place in range(len(requests))]
    step = drafter.step([Drafting(one, wanted) for one, wanted in zip(sequences, requests, strict=True)])
    for sequence in sequences:
        sequence.close()
    drafts = [draft for draft in step.drafts if isinstance(draft, Draft)]
    assert len(drafts) == len(requests)
    return drafts


def sureness(table: Tensor, start: int, draft: Draft) -> list[float]:
    """Returns how sure the table is of each place of a draft, and of the one behind it."""
    return [float(table[token].max()) for token in (start, *draft.token_ids)]


# What is asked for


def test_buckets_are_of_equal_width_and_have_both_ends() -> None:
    assert [bucket_of(value) for value in (0.0, 0.1249, 0.125, 0.5, 0.999, 1.0, 1.0000001)] == [0, 0, 1, 4, 7, 7, 7]


def test_no_block_ends_in_one_of_32_rounds_by_the_rounds_number_alone() -> None:
    stops = [stop_in(number, 0.5) for number in range(10 * MEASURED_EVERY)]
    assert (MEASURED_EVERY, stops.count(0.0), stops.count(0.5)) == (32, 10, 310)
    assert len({number % MEASURED_EVERY for number, stop in enumerate(stops) if stop == 0.0}) == 1
    assert {stop_in(number, None) for number in range(64)} == {None}


@pytest.mark.parametrize("value", [-0.01, 1.01, 2.0, math.nan, math.inf])
def test_what_is_no_probability_is_refused_in_a_line(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"^stop_below must be in 0..1, not [^\n]*$"):
        check_stop(value)
    assert [check_stop(good) for good in (None, 0.0, 1.0)] == [None, 0.0, 1.0]


def test_buckets_of_other_places_than_the_blocks_are_refused() -> None:
    assert [check_buckets(bytes(size), 2) for size in (0, 2, 3)] == [b"", b"\0\0", b"\0\0\0"]
    for buckets in (bytes(1), bytes(4), bytes([0, NUM_BUCKETS])):
        with pytest.raises(InvalidRequestError, match="confidence"):
            check_buckets(buckets, 2)


def verdict(num_drafted: int, num_accepted: int, buckets: Sequence[int]) -> Verdict:
    extra = TokenSource.RECOVERED if num_drafted else TokenSource.PLAIN
    return Verdict(
        FENCE, [0] * (num_accepted + 1), num_drafted, num_accepted, extra, 0, confidence_buckets=bytes(buckets)
    )


# What is drafted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_confidence_is_the_largest_probability_at_temperature_1(dtype: torch.dtype) -> None:
    logits = 4.0 * torch.randn(50, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = logits.double().softmax(dim=1).amax(dim=1)
    assert (confidence_of(logits) - expected).abs().max() < 1e-5
    logits[0, 3], logits[1] = torch.inf, -torch.inf
    assert confidence_of(logits)[:2].isnan().all(), "which is below nothing"


@pytest.mark.parametrize("sampling", [SAMPLED, SHARP, SamplingParams(0.0)], ids=["sampled", "sharp", "greedy"])
@pytest.mark.parametrize("changes", [{}, {"is_coupled": True, "needs_probs": False}], ids=["block", "coupled"])
def test_block_is_the_whole_one_up_to_the_first_place_that_is_not_sure(
    drafter: ForkingDrafter, table: Tensor, sampling: SamplingParams, changes: dict[str, bool]
) -> None:
    """Whatever temperature, truncation and penalties make of the row that is drawn from."""
    lengths = set()
    for number in range(30):
        start = number % VOCAB
        (whole,) = drafted(drafter, request(None, number, sampling=sampling, **changes), start=start)
        sure = sureness(table, start, whole)
        for stop in EVERYWHERE:
            (draft,) = drafted(drafter, request(stop, number, sampling=sampling, **changes), start=start)
            length = next((place for place, value in enumerate(sure[:-1]) if value < stop), 6)
            assert draft.token_ids == whole.token_ids[:length]
            assert list(draft.confidence_buckets) == [bucket_of(value) for value in sure[: length + (length < 6)]]
            assert draft.is_whole
            if draft.token_ids and draft.distributions.encoding is Encoding.DENSE_FLOAT32:
                size = len(draft.distributions.data)
                assert draft.distributions.data == whole.distributions.data[:size]
                decode_one(Claim(draft.token_ids, draft.distributions), VOCAB)
            lengths.add(length)
        assert whole.confidence_buckets == b""
    assert lengths >= {0, 1, 6}


def test_sessions_that_have_ended_leave_the_pass_and_others_are_as_alone(
    drafter: ForkingDrafter, table: Tensor
) -> None:
    requests = [request(stop, number, 3 + number % 4) for number in range(10) for stop in (None, 0.0, *STOPS)]
    alone = [drafted(drafter, one)[0] for one in requests]
    drafter.model.passes.clear()
    together = drafted(drafter, *requests)
    assert together == alone
    # A chain that has ended was in the pass that showed why, and in none after it; a whole one needs none at its end.
    lengths = [(len(one.token_ids), wanted.num_tokens) for one, wanted in zip(together, requests, strict=True)]
    in_passes = [length - (length == most) for length, most in lengths]
    assert drafter.model.passes == [sum(count > place for count in in_passes) for place in range(max(in_passes))]
    drafter.model.passes.clear()
    assert [one.token_ids for one in drafted(drafter, *[request(1.0, number) for number in range(4)])] == [[]] * 4
    assert drafter.model.passes == []


def test_nothing_is_computed_where_nobody_asks(drafter: ForkingDrafter) -> None:
    with mock.patch.object(confident_chains, "confidence_of", side_effect=AssertionError):
        drafted(drafter, request(None), request(None, 1, guesses=WantedGuesses()))
    with mock.patch.object(confident_chains, "confidence_of", wraps=confidence_of) as computed:
        drafted(drafter, request(None), request(0.0, 1, 4))
    assert [len(call.args[0]) for call in computed.call_args_list] == [1] * 4


def test_guesses_are_of_the_places_that_were_drawn(drafter: ForkingDrafter) -> None:
    for number in range(20):
        (whole,) = drafted(drafter, request(None, number, guesses=WantedGuesses()))
        (draft,) = drafted(drafter, request(0.6, number, guesses=WantedGuesses()))
        (unguessed,) = drafted(drafter, request(0.6, number))
        assert replace(draft, guesses=[]) == unguessed
        assert draft.guesses == whole.guesses[: len(draft.token_ids)]


def test_model_that_reads_drafts_approximately_is_as_sure_as_it_is_then(table: Tensor) -> None:
    """As one whose layers are computed in parallel: its rows too depend on kept tokens alone."""
    drafter = ForkingDrafter(FuzzyTableModel(table), 64)  # type: ignore[arg-type]
    for number in range(20):
        (whole,) = drafted(drafter, request(0.0, number))
        (draft,) = drafted(drafter, request(0.5, number))
        length = next((place for place, bucket in enumerate(whole.confidence_buckets) if bucket < 4), 6)
        assert draft.token_ids == whole.token_ids[:length]
        assert draft.confidence_buckets == whole.confidence_buckets[: length + 1]


def test_row_that_is_no_distribution_ends_a_block_as_it_does_elsewhere(table: Tensor) -> None:
    """And what is drawn behind it ends nothing."""
    table[2] = torch.nan
    drafter = ForkingDrafter(CountedTable(table), 64)  # type: ignore[arg-type]
    greedy = SamplingParams(0.0, allowed_token_ids=frozenset({2}))
    (draft,) = drafted(drafter, request(0.1, sampling=greedy))
    assert (draft.token_ids, len(draft.confidence_buckets)) == ([2], 1)
    sequence = drafter.open([2], salted("bad"))
    assert isinstance(drafter.step([Drafting(sequence, request(0.9))]).drafts[0], UnavailableError)


def test_block_that_was_cut_and_is_not_sure_of_the_next_place_is_not_whole(drafter: ForkingDrafter) -> None:
    """Nobody has looked at that place."""
    (draft,) = drafted(drafter, request(0.01, is_cut=lambda: True))
    assert (len(draft.token_ids), len(draft.confidence_buckets), draft.is_whole) == (1, 1, False)


# At the drafter and the gateway


def calibration(**changes: object) -> Calibration:
    return replace(Calibration(FENCE, 1, [1, 2], 4, stop_below=0.5), **changes)  # type: ignore[arg-type]


def test_drafter_asks_its_strategy_for_what_the_round_is_asked_for() -> None:
    option, session = SessionConfidence(is_known=True), SimpleNamespace(spec=SPEC)
    option.check_calibration(calibration(), SPEC)
    for number, wanted in ((15, 0.5), (16, 0.0), (17, 0.5)):
        of_round = calibration(fence=replace(FENCE, round=number))
        assert option.request(session, of_round, request(None)).stop_below == wanted  # type: ignore[arg-type]
    assert option.request(session, calibration(stop_below=None), request(None)).stop_below is None  # type: ignore[arg-type]


def test_drafter_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ProtocolViolationError, match="does not know how sure it is"):
        SessionConfidence(is_known=False).check_calibration(calibration(), SPEC)
    with pytest.raises(ProtocolViolationError, match="token tree"):
        SessionConfidence(is_known=True).check_calibration(calibration(tree=DraftTree(4)), SPEC)
    SessionConfidence(is_known=False).check_calibration(calibration(stop_below=None), SPEC)


@pytest.mark.parametrize(
    ("of_drafter", "of_target", "arm", "expected"),
    [
        ({CONFIDENCE}, {CONFIDENCE}, Arm(DraftSource.DRAFTER, 4), 0.5),
        ({CONFIDENCE}, {CONFIDENCE}, Arm(DraftSource.AHEAD, 4), 0.5),
        ({CONFIDENCE}, {CONFIDENCE}, Arm(DraftSource.DRAFTER, 4, 8), None),
        ({CONFIDENCE}, set(), Arm(DraftSource.DRAFTER, 4), None),
        (set(), {CONFIDENCE}, Arm(DraftSource.DRAFTER, 4), None),
    ],
    ids=["chain", "ahead", "tree", "a verifier of the version before", "a drafter of the version before"],
)
def test_gateway_asks_for_chains_where_both_peers_know_it(
    of_drafter: set[str], of_target: set[str], arm: Arm, expected: float | None
) -> None:
    session = SimpleNamespace(generation=SimpleNamespace(stop_below=0.5))
    option = ConfidentDrafts(session)  # type: ignore[arg-type]
    models = [SimpleNamespace(capabilities=frozenset(names)) for names in (of_drafter, of_target)]
    assert option.draft_spec(SPEC, *models) == SPEC  # type: ignore[arg-type]
    block = BlockRequest(arm, arm.length)
    option.request(block)
    assert block.stop_below == expected


def test_round_begun_on_an_outcome_ends_where_the_one_before_would() -> None:
    scheduler = Scheduler(context_length=64, max_draft_tokens=8, room=Room(4, 256), pacer=PrefillPacer(1.0))
    session = mock.Mock(spec=DraftSession, latest=calibration(max_rounds_ahead=1), last_asked=16, committed=[0] * 5)
    session.outcome = SimpleNamespace(fence=replace(FENCE, round=17, prefix_len=5))
    session.length_at.return_value = 4
    with mock.patch.object(scheduler, "ask") as asked:
        scheduler._go_on(session)
    assert asked.call_args.args[1].stop_below == 0.5


@pytest.mark.parametrize(
    ("judged", "is_told"), [(verdict(2, 1, []), True), (verdict(0, 0, [3]), True), (verdict(0, 0, []), False)]
)
def test_drafter_is_told_how_a_round_ended_that_its_block_had_no_token_in(judged: Verdict, is_told: bool) -> None:
    """It may begin the next one; of a plain round it hears from the gateway."""
    stream = SimpleNamespace(takes_outcomes=True, outbox=mock.Mock())
    session = SimpleNamespace(is_over=False, drafter_id=7, spec=SimpleNamespace(max_held_blocks=0), fence=FENCE)
    DrafterPeers.tell(SimpleNamespace(streams={7: stream}), session, judged)  # type: ignore[arg-type]
    assert stream.outbox.put.called == is_told


@pytest.mark.parametrize(
    ("judged", "why"), [(verdict(0, 0, [3]), WhyPlain.UNSURE), (verdict(0, 0, []), WhyPlain.EMPTY_BLOCK)]
)
def test_round_of_a_block_that_ended_before_its_first_token_has_a_reason(judged: Verdict, why: WhyPlain) -> None:
    seen: list[RoundTimes] = []
    watch = RoundWatch([seen.append], clock=lambda: 0.0)
    watch.ask(WhyPlain.EMPTY_BLOCK)
    watch.take(judged, 1.0)
    watch.end()
    assert [times.why_plain for times in seen] == [why]


# What is counted


def test_tokens_are_counted_by_bucket_as_far_as_the_target_reached_them() -> None:
    counts = BucketCounts()
    for drafted, accepted, buckets in ((3, 1, [7, 4, 4, 1]), (2, 2, [7, 4]), (0, 0, [2]), (2, 1, [])):
        counts.add(verdict(drafted, accepted, buckets))
    assert counts.of_fate[PlaceFate.ACCEPTED] == [0, 0, 0, 0, 1, 0, 0, 2]
    assert counts.of_fate[PlaceFate.REJECTED] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert counts.of_fate[PlaceFate.ENDED] == [0, 1, 1, 0, 0, 0, 0, 0]
    assert [counts.acceptance(bucket) for bucket in (7, 4, 1)] == [1.0, 0.5, None]
