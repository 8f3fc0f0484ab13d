"""What services say to each other survives the wire, its bytes do not change by accident, and nonsense is refused."""

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_type_hints

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from draftwire.errors import BlockViolationError, InvalidRequestError, ModelMismatchError, NoRoomError, Violation
from draftwire.method.ahead_limits import MAX_BRANCHES, MAX_ROUNDS_AHEAD
from draftwire.method.confidence import NUM_BUCKETS
from draftwire.method.distributions import rows_of
from draftwire.method.encoding import (
    DENSE_FORMATS,
    DenseProbs,
    DraftDistributions,
    Supports,
    encode_dense,
    encode_sparse,
)
from draftwire.method.quantization import Encoding
from draftwire.method.round_parts import (
    AheadPart,
    BranchLimits,
    GuessPart,
    LogprobsPart,
    StepSize,
    TreePart,
    WatchedGuess,
)
from draftwire.method.rounds import (
    BlockSent,
    Calibration,
    DraftBlock,
    DrafterIdentity,
    DraftSessionSpec,
    DraftTimings,
    DraftTree,
    Fence,
    LocalDraft,
    Permit,
    PlainRun,
    PromptRead,
    ReceivedBlock,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.method.token_source import TokenSource
from draftwire.method.tree_limits import MAX_TREE_NODES
from draftwire.models.description import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, ModelDescription, WarmUpStep
from draftwire.options.trees.token_tree import TokenTree
from draftwire.requests.logprobs import MAX_LOGPROBS, LogprobsMode, LogprobsRequest, PromptPart, TokenLogprob
from draftwire.requests.parameters import MAX_ALLOWED_TOKENS, MAX_BIASED_TOKENS, PARAMETERS, SamplingParams, TextForm
from draftwire.requests.rules import RuleFacts
from draftwire.requests.session_parameters import SessionParameters
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime import messages
from draftwire.runtime.status import error_of_number
from draftwire.runtime.traceparent import traceparent_of
from draftwire.v1 import drafter_pb2, gateway_pb2, session_pb2, verifier_pb2
from draftwire_gateway.server import _event_to_proto as gateway_event_to_proto
from draftwire_gateway.server import _statistics_to_proto
from draftwire_gateway.session.choices import ChoiceEvent, PromptEcho
from draftwire_gateway.session.committed_text import Delta, Finish, FinishReason
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.statistics import Statistics
from draftwire_verifier.drafter_peers import BlockRefused
from draftwire_verifier.server import _event_to_proto
from tests.trace_collector import span_context
from tests.unit.session_specs import changed as with_changes
from tests.unit.session_specs import draft_spec, target_spec

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1) | st.sampled_from([2**63, 2**64 - 1])
IDS = st.lists(UINT32, max_size=12)
KEYS = st.binary(min_size=16, max_size=16)
BRANCHES = st.integers(0, MAX_BRANCHES)
NODES = st.integers(0, MAX_TREE_NODES)
DRAFTER_ID, VOCAB_SIZE, MAX_DRAFT_TOKENS, MOST_NODES = 2**64 - 5, 320, 8, 12
FORMS = [
    StructuredOutput.json({"type": "object"}),
    StructuredOutput.regex("[0-9]+é"),
    StructuredOutput.choice(["b", "a", "\n"]),
    StructuredOutput.grammar('start: "a"'),
]
EXTRAS = sorted(set(TokenSource) - {TokenSource.ACCEPTED}, key=str)
FINITE = st.floats(max_value=0.0, width=32, allow_infinity=False, allow_nan=False)
TOKEN_LOGPROBS = st.builds(
    TokenLogprob,
    token_id=UINT32,
    logprob=FINITE | st.just(-math.inf),
    top=st.lists(st.tuples(UINT32, FINITE), max_size=MAX_LOGPROBS),
)
TRACEPARENTS = st.just("") | st.builds(
    span_context, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans()
).map(traceparent_of)
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: UINT32,
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: KEYS,
    list[int]: IDS,
    tuple[int, ...]: IDS.map(tuple),
    tuple[str, ...]: st.lists(st.text(max_size=8), max_size=3).map(tuple),
    frozenset[int]: st.frozensets(UINT32, max_size=6),
    frozenset[str]: st.frozensets(st.text(max_size=8), max_size=3),
    frozenset[int] | None: st.none() | st.frozensets(UINT32, min_size=1, max_size=4),
    tuple[tuple[int, float], ...]: st.dictionaries(UINT32, st.floats(-100.0, 100.0), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    int | None: st.none() | st.integers(0, MAX_LOGPROBS),
    TextForm | None: st.none(),
    LogprobsMode: st.sampled_from(LogprobsMode),
    TokenSource: st.sampled_from(EXTRAS),
    Encoding: st.sampled_from(Encoding),
    list[TokenLogprob]: st.lists(TOKEN_LOGPROBS, max_size=5),
    tuple[WarmUpStep, ...]: st.lists(st.builds(WarmUpStep, UINT32, UINT32), max_size=3).map(tuple),
}
"""What the fields of a type may hold, where nothing else is said."""


def made(kind: type, **own: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Returns instances of a dataclass with any values in all of its fields, and remembers how they are made."""
    of_field = {name: own[name] if name in own else OF_TYPE[hint] for name, hint in get_type_hints(kind).items()}
    OF_TYPE[kind] = st.builds(kind, **of_field)
    return OF_TYPE[kind]


def set_or_none(part: Any) -> Any:
    """Returns a part as it is read: one that reports nothing is as good as none."""
    return part if any(getattr(part, field.name) for field in fields(part)) else None


def verdicts(tokens: list[TokenLogprob]) -> st.SearchStrategy[Verdict]:
    """Returns verdicts of these tokens, with and without what is reported of them."""
    own = st.just([token.token_id for token in tokens])
    drafted = st.lists(FINITE | st.just(-math.inf), min_size=len(tokens), max_size=len(tokens))
    return made(
        Verdict,
        token_ids=own,
        logprobs=st.builds(LogprobsPart, st.sampled_from([[], tokens]), st.just([]) | drafted).map(set_or_none),
        num_draft_tokens=st.integers(0, 8),
        confidence_buckets=st.just(b""),
    ).flatmap(with_confidence)


def with_confidence(verdict: Verdict) -> st.SearchStrategy[Verdict]:
    """Returns a verdict that says how sure the drafter was of its places, or not."""
    most = verdict.num_draft_tokens + 1
    buckets = st.lists(st.integers(0, NUM_BUCKETS - 1), min_size=most - 1, max_size=most).map(bytes)
    return (st.just(b"") | buckets).map(lambda buckets: replace(verdict, confidence_buckets=buckets))


made(Fence, session_id=UINT64, prefix_hash=UINT64)
made(DraftTimings)
OF_TYPE[Permit | None] = st.none() | made(Permit)
OF_TYPE[LocalDraft | None] = st.none() | made(LocalDraft)
OF_TYPE[WatchedGuess | None] = st.none() | made(WatchedGuess)
for part in (GuessPart, AheadPart, TreePart, StepSize):
    OF_TYPE[part | None] = made(part).map(set_or_none)
SHAPES = st.lists(st.integers(0, MAX_TREE_NODES), min_size=1, max_size=MAX_TREE_NODES).map(
    lambda numbers: TokenTree(tuple(sorted(min(number, node) - 1 for node, number in enumerate(numbers))))
)
OF_TYPE[DraftTree | None] = (
    st.none()
    | st.builds(DraftTree, st.integers(1, MAX_TREE_NODES))
    | SHAPES.map(lambda shape: DraftTree(len(shape), shape))
)
made(LogprobsRequest)
made(PromptPart)
OF_TYPE[SamplingParams] = made(
    SamplingParams,
    temperature=st.floats(0.0, 100.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.0, 100.0, exclude_min=True),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
) | st.builds(SamplingParams, structured_output=st.sampled_from(FORMS))
RULE = made(RuleFacts, name=st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True))
OF_TYPE[tuple[RuleFacts, ...]] = st.lists(RULE, max_size=3).map(tuple)
made(SessionParameters, traceparent=TRACEPARENTS)
made(DraftDistributions, data=st.binary(max_size=40))  # any: they are checked after the wire

FENCE = Fence(session_id=0x1122334455667788, epoch=1, round=300, prefix_len=5, prefix_hash=0xF1F2F3F4F5F6F7F8)
GOLDEN_FENCE = bytes.fromhex(
    "09 8877665544332211"  # 1: session_id, fixed64 little-endian
    "10 01"  # 2: epoch
    "18 ac02"  # 3: round, varint 300
    "20 05"  # 4: prefix_len
    "29 f8f7f6f5f4f3f2f1"  # 5: prefix_hash, fixed64 little-endian
)
BLOCK = DraftBlock(
    fence=FENCE,
    token_ids=[7, 300],
    distributions=DraftDistributions(
        Encoding.SPARSE_UINT16,
        301,
        bytes.fromhex("0700 2c01 0500 2c01 ff9b63 ff bf3f ff"),
        support_sizes=(3, 1),
        wide_sizes=(2, 1),
    ),
    timings=DraftTimings(calibration_us=10, draft_us=200),
    permit=Permit.make(bytes(range(16)), 300),
)
GOLDEN_PERMIT = bytes.fromhex(
    "08 ac02"  # 1: number, varint 300
    "12 10 9f7af5d478a6b3a50e33baba94f046cb"  # 2: token: BLAKE2b-128 of 2c010000 under the key 000102..0f
)
GOLDEN_NAMED_PERMIT = bytes.fromhex(
    "08 ac02"  # 1: number, varint 300
    "12 10 eda2713087f3608dd37afb0f4645e392"  # 2: token: the same of 2c010000 0700000000000000
)
GOLDEN_IDENTITY = bytes.fromhex(
    "09 0700000000000000"  # 1: drafter_id, fixed64 little-endian
    "12 10 000102030405060708090a0b0c0d0e0f"  # 2: token
)
GOLDEN_BLOCK_START = (
    bytes.fromhex("0a 19")  # 1: fence, 25 bytes
    + GOLDEN_FENCE
    + bytes.fromhex("1a 03 07ac02")  # 3: token_ids, packed
)
GOLDEN_BLOCK_END = (
    bytes.fromhex(
        "30 0a"  # 6: calibration_duration_us
        "38 c801"  # 7: draft_duration_us
        "42 15"  # 8: permit, 21 bytes
    )
    + GOLDEN_PERMIT
)
GOLDEN_BLOCK = (
    GOLDEN_BLOCK_START
    + bytes.fromhex(
        "2a 1e"  # 5: distributions, 30 bytes
        "08 03"  # 1: encoding, sparse uint16
        "10 ad02"  # 2: vocab_size
        "1a 0f"  # 3: data, 15 bytes
        "0700 2c01 0500 2c01"  # ids 7, 300 and 5; 300
        "ff 9b 63 ff"  # low bytes of weights less one: 49,152, 16,284 and 100; 65,536
        "bf 3f ff"  # high bytes of the first two; of the only one
        "22 02 0301"  # 4: support_sizes, packed
        "2a 02 0201"  # 5: wide_sizes, packed
    )
    + GOLDEN_BLOCK_END
)
GOLDEN_DENSE = bytes.fromhex(
    "08 01"  # 1: encoding, dense float32
    "10 02"  # 2: vocab_size
    "1a 10 0000803e 0000403f 0000803f 00000000"  # 3: data, float32 little-endian, row-major
)
VERDICT = Verdict(
    fence=FENCE,
    token_ids=[7, 300, 4],
    num_draft_tokens=4,
    num_accepted_tokens=2,
    extra=TokenSource.RECOVERED,
    plain_rounds_left=6,
    verify_us=1,
    queue_us=128,
    timings=DraftTimings(calibration_us=10, draft_us=200),
    num_cached_tokens=144,
)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
GOLDEN_VERDICT = (
    bytes.fromhex("0a 19")  # 1: fence, 25 bytes
    + GOLDEN_FENCE
    + bytes.fromhex(
        "10 04"  # 2: num_draft_tokens
        "18 02"  # 3: num_accepted_tokens
        "22 04 07ac0204"  # 4: token_ids, packed
        "28 02"  # 5: extra_token_kind, recovered
        "30 06"  # 6: plain_rounds_left
        "38 01"  # 7: verify_duration_us
        "40 8001"  # 8: queue_duration_us
        "48 0a"  # 9: calibration_duration_us
        "50 c801"  # 10: draft_duration_us
        "58 9001"  # 11: num_cached_tokens
    )
)
GOLDEN_TOP = bytes.fromhex(  # 38 bytes
    "08 02"  # 1: num_top
    "12 10 07000000 2c010000 2c010000 00000000"  # 2: token_ids, uint32 little-endian: 7, 300; 300 and none
    "1a 10 000000bf 000080bf 00000000 000080ff"  # 3: logprobs, float32 little-endian: -0.5, -1; 0 and -infinity
)
REPORTED = [TokenLogprob(300, -1.0, [(7, -0.5), (300, -1.0)]), TokenLogprob(300, 0.0, [(300, 0.0)])]
"""Two places: two possible tokens in the first, one in the second."""
TARGET_SPEC = target_spec(
    session_id=1,
    epoch=2,
    first_round=3,
    choice=4,
    token_ids=[7, 300],
    prompt_len=1,
    sampling=SamplingParams(),
    rule="block",
    verifying_key=bytes(range(16)),
    max_draft_tokens=5,
    plain_rounds=6,
    stop_token_ids=frozenset({9, 8}),
    max_len=400,
    cache_salt="salt",
    permit_key=bytes(range(16, 32)),
)
GOLDEN_SAMPLING = (  # 58 bytes
    "09 000000000000f03f 10 00 19 000000000000f03f"  # 1: temperature 1.0, 2: top_k 0, 3: top_p 1.0
    "21 0000000000000000 29 000000000000f03f"  # 4: min_p 0.0, 5: repetition_penalty 1.0
    "31 0000000000000000 39 0000000000000000 50 00"  # 6, 7: presence and frequency penalty 0.0, 10: min_tokens 0
)
GOLDEN_PARAMETERS = (  # 91 bytes
    "08 04"  # 1: choice
    "10 01"  # 2: prompt_len
    f"1a 3a {GOLDEN_SAMPLING}"  # 3: sampling
    "22 0d 0a 05 626c6f636b 10 01 18 01 28 01"  # 4: rule, its name, is_lossless, needs_draft_probs, takes_trees
    "28 05"  # 5: max_draft_tokens
    "32 02 0809"  # 6: stop_token_ids, packed, ascending
    "3a 04 73616c74"  # 7: cache_salt
)
GOLDEN_TARGET_SPEC = bytes.fromhex(
    "09 0a00000000000000"  # 1: lease_id, fixed64 little-endian
    "11 0100000000000000"  # 2: session_id, fixed64 little-endian
    "18 02"  # 3: epoch
    "20 03"  # 4: first_round
    "32 03 07ac02"  # 6: token_ids, packed
    "52 10 000102030405060708090a0b0c0d0e0f"  # 10: verifying_key
    "60 06"  # 12: plain_rounds
    "70 9003"  # 14: max_len
    "8a01 10 101112131415161718191a1b1c1d1e1f"  # 17: permit_key
)
"""Without the parameters, which come last."""
DRAFT_SPEC = draft_spec(
    session_id=1,
    epoch=2,
    choice=4,
    token_ids=[7, 300],
    prompt_len=1,
    sampling=SamplingParams(),
    rule="block",
    drafting_key=bytes(range(16)),
    stop_token_ids=frozenset((9, 8)),
    verifier_address="v:1",
    target_vocab_size=320,
    max_draft_tokens=5,
    max_len=400,
    cache_salt="salt",
    permit=Permit.make(bytes(range(16)), 300),
)
GOLDEN_DRAFT_SPEC = bytes.fromhex(
    "09 0a00000000000000"  # 1: lease_id, fixed64 little-endian
    "11 0100000000000000"  # 2: session_id, fixed64 little-endian
    "18 02"  # 3: epoch
    "2a 03 07ac02"  # 5: token_ids, packed
    "42 10 000102030405060708090a0b0c0d0e0f"  # 8: drafting_key
    "4a 03 763a31"  # 9: verifier_address
    "50 c002"  # 10: target_vocab_size
    "60 9003"  # 12: max_len
    f"8201 15 {GOLDEN_PERMIT.hex()}"  # 16: permit, 21 bytes
)
"""Without the parameters, which come last."""
GOLDEN_SEND_DRAFTED = bytes.fromhex(
    "09 8877665544332211"  # 1: session_id, fixed64 little-endian
    "10 01"  # 2: epoch
    "18 ac02"  # 3: round, varint 300
)
MODEL = ModelDescription(
    name="m",
    revision="r",
    dtype="float32",
    vocabulary_fingerprint=b"\x01\x02",
    vocab_size=300,
    context_length=400,
    stop_token_ids=(8, 9),
    weights_fingerprint=b"\x03\x04",
    capabilities=frozenset({"b", "a"}),
    rules=(RuleFacts("typical", is_lossless=False, needs_draft_probs=False),),
)
SECOND_CHOICE = Generation([1], SamplingParams(), 4, (), frozenset(), 5, 4, RuleFacts("token"), choice=1)
GOLDEN_MODEL = bytes.fromhex(
    "08 0a"  # 1: protocol_version
    "12 01 6d"  # 2: name
    "1a 01 72"  # 3: revision
    "22 07 666c6f61743332"  # 4: dtype
    "2a 02 0102"  # 5: vocabulary_fingerprint
    "30 ac02"  # 6: vocab_size
    "38 9003"  # 7: context_length
    "42 02 0809"  # 8: stop_token_ids, packed
    "4a 02 0304"  # 9: weights_fingerprint
    "50 0a"  # 10: oldest_protocol_version
    "5a 01 61 5a 01 62"  # 11: capabilities, ascending
    "62 09 0a 07 7479706963616c"  # 12: rules
)


def sent(message: Message) -> Message:
    """Returns what a peer receives."""
    return type(message).FromString(message.SerializeToString())


def wire_block(tokens: int = 1, **changes: object) -> session_pb2.DraftBlock:
    stated = session_pb2.DraftDistributions(**({"vocab_size": 4} | changes))
    return session_pb2.DraftBlock(token_ids=[1] * tokens, distributions=stated)


def received(*blocks: session_pb2.DraftBlock) -> list[ReceivedBlock]:
    limits = (VOCAB_SIZE, MAX_DRAFT_TOKENS, MOST_NODES)
    return messages.blocks_from_proto([sent(block) for block in blocks], DRAFTER_ID, *limits)


def refusal(block: session_pb2.DraftBlock) -> BlockViolationError:
    (refused,) = received(block)
    assert isinstance(refused.draft, BlockViolationError)
    return refused.draft


LEASE = 2**64 - 3
WIRE: dict[type, tuple[st.SearchStrategy[Any], Callable[[Any], Message], Callable[[Any], Any]]] = {
    Fence: (OF_TYPE[Fence], messages.fence_to_proto, messages.fence_from_proto),
    SamplingParams: (OF_TYPE[SamplingParams], messages.sampling_to_proto, messages.sampling_from_proto),
    Verdict: (
        st.lists(TOKEN_LOGPROBS, max_size=5).flatmap(verdicts),
        messages.verdict_to_proto,
        messages.verdict_from_proto,
    ),
    PromptRead: (
        made(PromptRead, session_id=UINT64),
        messages.prompt_read_to_proto,
        messages.prompt_read_from_proto,
    ),
    PlainRun: (made(PlainRun), messages.plain_run_to_proto, messages.plain_run_from_proto),
    Calibration: (
        made(
            Calibration,
            max_rounds_ahead=st.integers(0, MAX_ROUNDS_AHEAD),
            stop_below=st.none() | st.floats(0.0, 1.0),
        ),
        messages.calibration_to_proto,
        messages.calibration_from_proto,
    ),
    BlockSent: (
        made(BlockSent, session_id=UINT64),
        messages.block_sent_to_proto,
        messages.block_sent_from_proto,
    ),
    SendDrafted: (
        made(SendDrafted, session_id=UINT64),
        messages.send_drafted_to_proto,
        messages.send_drafted_from_proto,
    ),
    ModelDescription: (
        made(
            ModelDescription,
            oldest_protocol_version=st.integers(1, PROTOCOL_VERSION),
            protocol_version=st.integers(OLDEST_PROTOCOL_VERSION, 2**32 - 1),
        ),
        messages.model_to_proto,
        messages.model_from_proto,
    ),
    TargetSessionSpec: (
        made(
            TargetSessionSpec,
            session_id=UINT64,
            permit_key=st.just(b"") | KEYS,
            max_held_blocks=BRANCHES,
            max_tree_nodes=NODES,
        ),
        lambda spec: messages.target_spec_to_proto(spec, LEASE),
        messages.target_spec_from_proto,
    ),
    DraftSessionSpec: (
        made(
            DraftSessionSpec,
            session_id=UINT64,
            ahead=st.none() | st.builds(BranchLimits, st.integers(1, MAX_BRANCHES), BRANCHES),
            max_tree_nodes=NODES,
        ),
        lambda spec: messages.draft_spec_to_proto(spec, LEASE),
        messages.draft_spec_from_proto,
    ),
}


@pytest.mark.parametrize("kind", WIRE)
@given(st.data())
def test_message_survives_the_wire(kind: type, data: st.DataObject) -> None:
    strategy, to_proto, from_proto = WIRE[kind]
    value = data.draw(strategy)
    message = sent(to_proto(value))
    assert from_proto(message) == value
    assert getattr(message, "lease_id", LEASE) == LEASE


def test_sampling_parameters_are_sent_by_their_names_even_if_zero() -> None:
    assert set(PARAMETERS) <= set(session_pb2.SamplingParameters.DESCRIPTOR.fields_by_name)
    assert messages.sampling_from_proto(session_pb2.SamplingParameters()) == SamplingParams()
    message = sent(messages.sampling_to_proto(SamplingParams(temperature=0.0, top_k=0, top_p=1.0)))
    names = [name for name in PARAMETERS if name not in ("logit_bias", "allowed_token_ids", "structured_output")]
    assert all(message.HasField(name) for name in names)


@given(made(DraftBlock, parents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12).map(tuple)))
def test_draft_block_travels_with_all_it_says(block: DraftBlock) -> None:
    """Its distributions are any: they are checked after the wire."""
    message = sent(messages.block_to_proto(block))
    stated, distributions = message.distributions, block.distributions
    assert (list(message.token_ids), tuple(message.parent_indices)) == (block.token_ids, block.parents)
    assert message.confidence_buckets == block.confidence_buckets
    assert (stated.vocab_size, stated.data) == (distributions.vocab_size, distributions.data)
    assert tuple(stated.support_sizes) == distributions.support_sizes
    assert tuple(stated.wide_sizes) == distributions.wide_sizes
    name = session_pb2.DistributionEncoding.Name(stated.encoding)
    assert name == f"DISTRIBUTION_ENCODING_{distributions.encoding.name}"
    (got,) = received(message)
    assert (got.fence, got.timings, got.permit, got.is_ahead) == (
        *(block.fence, block.timings),
        *(block.permit, block.is_ahead),
    )
    assert (got.drafter_id, got.has_distributions) == (DRAFTER_ID, distributions.encoding is not Encoding.NONE)


def test_block_that_ended_before_its_first_token_is_taken_between_others() -> None:
    """If it says how sure the drafter was of that place, and nothing else of it."""
    whole = wire_block(1, encoding=session_pb2.DISTRIBUTION_ENCODING_ONE_HOT)
    empty = wire_block(0, encoding=session_pb2.DISTRIBUTION_ENCODING_ONE_HOT)
    unsure = changed(empty, confidence_buckets=b"\3")
    stopped = changed(whole, confidence_buckets=b"\7\2")
    first, second, third = received(whole, unsure, stopped)
    assert (first.token_ids, first.confidence_buckets) == ([1], b"")
    assert (second.token_ids, second.confidence_buckets, second.has_distributions) == ([], b"\3", True)
    assert isinstance(second.draft, Supports)
    assert second.draft.token_ids.shape == (0, 1)
    assert (third.token_ids, third.confidence_buckets) == ([1], b"\7\2")
    assert refusal(empty).violation is Violation.LENGTH
    assert (
        refusal(changed(unsure, distributions=changed(unsure.distributions, data=b"\0"))).violation is Violation.LENGTH
    )
    for buckets in (b"\3\3", b"\10", bytes(10**6)):
        assert refusal(changed(empty, confidence_buckets=buckets)).violation is Violation.ENCODING
    tree = changed(whole, token_ids=[1, 2], parent_indices=[-1, -1], confidence_buckets=b"\1\1")
    assert refusal(tree).violation is Violation.ENCODING


@given(st.lists(st.tuples(OF_TYPE[Fence], st.sampled_from(Encoding), st.integers(0, 3)), max_size=6))
def test_blocks_of_one_message_keep_their_order_and_what_was_drawn_from(
    parts: list[tuple[Fence, Encoding, int]],
) -> None:
    """Good blocks of all encodings, and some without tokens, which are wrong."""
    row = [0.0, 0.25, 0.25, 0.5]
    blocks = []
    for fence, encoding, length in parts:
        distributions = DraftDistributions(encoding, 4)
        if encoding is Encoding.SPARSE_UINT16:
            data = bytes([3, 1] * length) + bytes.fromhex("fe00") * length + bytes.fromhex("ff") * length
            distributions = DraftDistributions(encoding, 4, data, (2,) * length, (1,) * length)
        elif encoding in DENSE_FORMATS:
            distributions = encode_dense(encoding, np.array([row] * length).reshape(length, 4))
        blocks.append(messages.block_to_proto(DraftBlock(fence, [3] * length, distributions)))
    for (fence, encoding, length), block in zip(parts, received(*blocks), strict=True):
        assert (block.fence, block.drafter_id) == (fence, DRAFTER_ID)
        if not length:
            assert isinstance(block.draft, BlockViolationError)
            assert block.draft.violation is Violation.LENGTH
            continue
        assert block.token_ids == [3] * length
        assert isinstance(block.draft, DenseProbs) == (encoding in DENSE_FORMATS)
        expected = [0.0, 1 / 65_536, 0.0, 65_535 / 65_536] if encoding is Encoding.SPARSE_UINT16 else [0, 0, 0, 1]
        found = rows_of(block.draft).dense()[:, :4].tolist()
        assert found == [row if encoding in DENSE_FORMATS else expected] * length


# Golden bytes


def second(event: Any) -> gateway_pb2.GenerateResponse:
    return gateway_event_to_proto(ChoiceEvent(SECOND_CHOICE, event))


OWN_LOGPROBS = "08 000080bf 00000000"
"""Packed float32: -1 and 0."""
DRAFTED = "0c 000080bf 00000000 000080ff"
PLAIN = Delta([7], "", [], [TokenSource.PLAIN], 0)
SPAN = TRACEPARENT.encode().hex()
REPORTING = LogprobsRequest(0, 20, LogprobsMode.PROCESSED)
GENERATED = gateway_pb2.GeneratedChoice(choice=3, token_ids=[7, 300], is_finished=True)
DENSE_BLOCK = DraftBlock(
    FENCE, [1, 0], encode_dense(Encoding.DENSE_FLOAT32, np.array([[0.25, 0.75], [1.0, 0.0]], dtype=np.float32))
)
PARAMETERS_OF_TARGET, PARAMETERS_OF_DRAFT = f"ba01 5b {GOLDEN_PARAMETERS}", f"9201 5b {GOLDEN_PARAMETERS}"  # 23, 18
TRACED_OF_TARGET = f"ba01 9401 {GOLDEN_PARAMETERS} 42 37 {SPAN}"  # 148 bytes; 8: traceparent
TRACED_OF_DRAFT = f"9201 9401 {GOLDEN_PARAMETERS} 42 37 {SPAN}"
SPECS = {
    "opening of a target session": (TARGET_SPEC, GOLDEN_TARGET_SPEC.hex() + PARAMETERS_OF_TARGET),
    "its span": (with_changes(TARGET_SPEC, traceparent=TRACEPARENT), GOLDEN_TARGET_SPEC.hex() + TRACED_OF_TARGET),
    "its wish for details": (  # 21: draft_logprobs
        replace(TARGET_SPEC, reports_draft_logprobs=True),
        GOLDEN_TARGET_SPEC.hex() + "a80101" + PARAMETERS_OF_TARGET,
    ),
    "its wish for log-probabilities": (  # 18: logprobs, 19: prompt_logprobs, 20: logprobs_mode
        replace(TARGET_SPEC, logprobs=REPORTING),
        GOLDEN_TARGET_SPEC.hex() + "900100 980114 a20109" + b"processed".hex() + PARAMETERS_OF_TARGET,
    ),
    "opening of a draft session": (DRAFT_SPEC, GOLDEN_DRAFT_SPEC.hex() + PARAMETERS_OF_DRAFT),
    "its span, too": (with_changes(DRAFT_SPEC, traceparent=TRACEPARENT), GOLDEN_DRAFT_SPEC.hex() + TRACED_OF_DRAFT),
}
GOLDEN_RUN = f"0a {len(GOLDEN_FENCE):02x}{GOLDEN_FENCE.hex()} 10 ac02"  # 1: fence, 2: num_rounds
SENT: dict[str, tuple[Any, str]] = {
    "fence": (FENCE, GOLDEN_FENCE.hex()),
    "verdict": (VERDICT, GOLDEN_VERDICT.hex()),
    "verdict with log-probabilities": (  # 13: logprobs, 14: top_logprobs, 38 bytes
        replace(VERDICT, token_ids=[300, 300], logprobs=LogprobsPart(REPORTED)),
        GOLDEN_VERDICT.hex().replace("220407ac0204", "2204ac02ac02") + "6a" + OWN_LOGPROBS + "72 26" + GOLDEN_TOP.hex(),
    ),
    "verdict with details": (  # 15: packed float32
        replace(VERDICT, logprobs=LogprobsPart(draft=[-1.0, 0.0, -math.inf])),
        GOLDEN_VERDICT.hex() + "7a" + DRAFTED,
    ),
    "block under way": (SendDrafted(FENCE.session_id, 1, 300), GOLDEN_SEND_DRAFTED.hex()),
    "block that was sent": (BlockSent(FENCE.session_id, 1, 300), GOLDEN_SEND_DRAFTED.hex()),
    "verdict of a draft of the verifier's own": (  # 16: local_strategy
        replace(VERDICT, guess=GuessPart("suffix")),
        GOLDEN_VERDICT.hex() + "820106" + b"suffix".hex(),
    ),
    "verdict of a session with a form": (  # 23: mask_duration_us
        replace(VERDICT, mask_us=300),
        GOLDEN_VERDICT.hex() + "b801ac02",
    ),
    "model": (MODEL, GOLDEN_MODEL.hex()),
    "model that drafts by itself": (  # 13: local_strategies
        replace(MODEL, local_strategies=("suffix", "b")),
        GOLDEN_MODEL.hex() + "6a06" + b"suffix".hex() + "6a0162",
    ),
    "model that was warmed up": (  # 15: warm_up_steps, of rows and microseconds
        replace(MODEL, warm_up_steps=(WarmUpStep(2, 900),)),
        GOLDEN_MODEL.hex() + "7a05 0802 108407",
    ),
    **SPECS,
}
"""Messages that are read back too."""
WRITTEN: dict[str, tuple[Message, str]] = {
    "draft block": (messages.block_to_proto(BLOCK), GOLDEN_BLOCK.hex()),
    "dense distributions": (messages.block_to_proto(DENSE_BLOCK).distributions, GOLDEN_DENSE.hex()),
    "permit": (messages.permit_to_proto(Permit.make(bytes(range(16)), 300)), GOLDEN_PERMIT.hex()),
    "permit with a name": (messages.permit_to_proto(Permit.make(bytes(range(16)), 300, 7)), GOLDEN_NAMED_PERMIT.hex()),
    "plain run": (
        messages.plain_run_to_proto(PlainRun(FENCE, 300)),
        GOLDEN_RUN,
    ),
    "run with drafts": (  # 3: draft
        messages.plain_run_to_proto(PlainRun(FENCE, 300, LocalDraft("b", 4))),
        GOLDEN_RUN + "1a 05 0a 01 62 10 04",
    ),
    "identity": (messages.identity_to_proto(DrafterIdentity(7, bytes(range(16)))), GOLDEN_IDENTITY.hex()),
    "wrapped block under way": (  # 3: send_drafted, 14 bytes
        drafter_pb2.DraftCommand(send_drafted=drafter_pb2.SendDrafted.FromString(GOLDEN_SEND_DRAFTED)),
        "1a0e" + GOLDEN_SEND_DRAFTED.hex(),
    ),
    "wrapped reply": (  # 3: sent, 14 bytes
        drafter_pb2.DraftEvent(sent=drafter_pb2.BlockSent.FromString(GOLDEN_SEND_DRAFTED)),
        "1a0e" + GOLDEN_SEND_DRAFTED.hex(),
    ),
    "lease": (session_pb2.Lease(lease_id=1, instance_id=2**64 - 2), "090100000000000000 11feffffffffffffff"),
    "hello": (verifier_pb2.DrafterHello(instance_id=2**64 - 2), "11feffffffffffffff"),
    "log-probabilities of a delta": (
        second(Delta([300, 300], "", REPORTED)).delta,
        "08 01 12 04 ac02ac02 22" + OWN_LOGPROBS + "2a 26" + GOLDEN_TOP.hex(),
    ),
    "log-probabilities of a prompt": (  # 3: prompt_logprobs: choice, position, ids
        second(PromptPart(300, REPORTED)),
        "1a 3d 08 01 10 ac02 1a 04 ac02ac02 22" + OWN_LOGPROBS + "2a 26" + GOLDEN_TOP.hex(),
    ),
    "prompt that was read": (  # 5: prompt_read, 1 to 4 of it
        _event_to_proto(PromptRead(FENCE.session_id, 1, PromptPart(300, REPORTED))),
        "2a 46 09 8877665544332211 10 01 18 ac02 22 04 ac02ac02 2a" + OWN_LOGPROBS + "32 26" + GOLDEN_TOP.hex(),
    ),
    "details of tokens": (  # 6 to 9
        second(Delta([7, 7, 7], "ab", [], VERDICT.sources, 4, [-1.0, 0.0, -math.inf], [1, 0, 1])).delta,
        "0801 1203 070707 1a02 6162 3203 010102 3804 42" + DRAFTED + "4a03 010001",
    ),
    "plain token": (second(PLAIN).delta, "0801 1201 07 3201 04"),
    "bonus token": (second(replace(PLAIN, sources=[TokenSource.BONUS])).delta, "0801 1201 07 3201 03"),
    "echo": (second(PromptEcho([7, 300], "ab")), "220b 0801 120307ac02 1a026162"),  # 4: choice, packed ids, text
    "wish for log-probabilities": (  # 16, 17, 18
        gateway_pb2.GenerateRequest(logprobs=0, prompt_logprobs=20, logprobs_mode="raw"),
        "800100 880114 920103" + b"raw".hex(),
    ),
    "text that is continued": (  # 22: choice, packed ids, whether it is finished
        gateway_pb2.GenerateRequest(generated_choices=[GENERATED]),
        "b20109 0803 120307ac02 1801",
    ),
}


def written(message: Message) -> str:
    return message.SerializeToString(deterministic=True).hex()


def test_messages_have_their_golden_bytes_and_are_read_from_them() -> None:
    for name, (value, golden) in SENT.items():
        _, to_proto, from_proto = WIRE[type(value)]
        message, expected = to_proto(value), golden.replace(" ", "")
        if name in SPECS:
            message.lease_id = 10
        assert written(message) == expected, name
        assert from_proto(type(message).FromString(bytes.fromhex(expected))) == value, name
    for name, (message, golden) in WRITTEN.items():
        assert written(message) == golden.replace(" ", ""), name


def test_draft_block_is_read_from_its_golden_bytes() -> None:
    (block,) = received(session_pb2.DraftBlock.FromString(GOLDEN_BLOCK))
    assert (block.fence, block.token_ids, block.timings, block.permit) == (
        *(BLOCK.fence, BLOCK.token_ids),
        *(BLOCK.timings, BLOCK.permit),
    )
    assert not messages.block_to_proto(replace(BLOCK, permit=None)).HasField("permit")
    assert isinstance(block.draft, Supports)
    assert block.draft.weights.tolist() == [[49_152, 16_284, 100], [65_536, 0, 0]]
    assert block.draft.vocab_size == VOCAB_SIZE
    assert block.draft.token_ids[0].tolist() == [7, 300, 5]
    assert block.draft.token_ids[1, 0] == 300
    permit = messages.permit_from_proto(session_pb2.DraftPermit.FromString(GOLDEN_PERMIT))
    assert permit.is_made_with(bytes(range(16)))
    assert permit.is_made_with(bytes(range(16)), 7)
    assert not permit.is_made_with(bytes(16))
    named = messages.permit_from_proto(session_pb2.DraftPermit.FromString(GOLDEN_NAMED_PERMIT))
    assert named.is_made_with(bytes(range(16)), 7)
    assert not named.is_made_with(bytes(range(16)), 8)
    assert not named.is_made_with(bytes(range(16)))


def test_every_number_of_the_statistics_reaches_the_user() -> None:
    """Each field of the message is the one of the same name; durations are named longer on the wire."""
    values = {field.name: 100 + index for index, field in enumerate(fields(Statistics))}
    lists = {
        "num_accepted_tokens_per_pos": [3, 2],
        "acceptance_histogram": [4, 1, 2],
        "draft_length_histogram": [1, 0, 7],
    }
    statistics = Statistics(**(values | lists))
    message = sent(_statistics_to_proto(statistics))
    shorter = {f"{name}_duration_us": f"{name}_us" for name in ("calibration", "draft", "verify", "queue")}
    averages = {"mean_acceptance_length", "draft_acceptance_rate"}
    assert {shorter.get(field.name, field.name) for field in message.DESCRIPTOR.fields} == set(values) | averages
    for field in message.DESCRIPTOR.fields:
        found = getattr(message, field.name)
        assert (found if isinstance(found, int | float) else list(found)) == getattr(
            statistics, shorter.get(field.name, field.name)
        )
    finish = second(Finish(FinishReason.LENGTH, Statistics(), "")).finish
    assert (finish.choice, finish.seed, finish.rejection_sample_method) == (1, 5, "token")


def test_failures_and_refusals_carry_what_their_receiver_needs() -> None:
    failed = sent(messages.failure_to_proto(2**64 - 1, 3, NoRoomError("full")))
    error = error_of_number(failed.status_code, failed.message)
    assert (failed.session_id, failed.epoch) == (2**64 - 1, 3)
    assert (type(error), str(error)) == (NoRoomError, "full")
    for drafter_id in (None, 0, 2**64 - 1):
        event = sent(_event_to_proto(BlockRefused(2**64 - 1, 2, 3, "why", 300, drafter_id)))
        refused = event.refusal
        assert (event.WhichOneof("event"), refused.session_id, refused.epoch) == ("refusal", 2**64 - 1, 2)
        assert (refused.round, refused.message, refused.permit_number) == (3, "why", 300)
        assert refused.HasField("quarantined_drafter_id") == (drafter_id is not None), "which one, or that none is"
        assert refused.quarantined_drafter_id == (drafter_id or 0)


def test_protocol_version_is_that_of_these_golden_bytes() -> None:
    """Older peers would find no parameters in an opening."""
    assert OLDEST_PROTOCOL_VERSION == PROTOCOL_VERSION == 10


# What is refused


def changed(message: Any, **values: Any) -> Any:
    """Returns a message with other values of some fields; None clears one."""
    other = sent(message)
    for name, value in values.items():
        other.ClearField(name)
        if value is not None:
            other.MergeFrom(type(other)(**{name: value}))
    return other


TARGET = messages.target_spec_to_proto(TARGET_SPEC, 10)
DRAFT = messages.draft_spec_to_proto(DRAFT_SPEC, 10)
BARE_VERDICT = session_pb2.Verdict(
    extra_token_kind=session_pb2.EXTRA_TOKEN_KIND_PLAIN, token_ids=[7, 8], logprobs=[-1.0, -2.0]
)
OUT_OF_RANGE: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-0.1, 100.1, math.nan, math.inf)),
    *({"top_p": value} for value in (0.0, 1.1, math.nan)),
    *({name: value} for name, value in (("min_p", -0.1), ("repetition_penalty", 0.0))),
    *({name: value} for name, value in (("presence_penalty", 2.1), ("frequency_penalty", -2.1))),
    {"logit_bias": {3: 100.5}},
    {"logit_bias": dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0)},
    {"allowed_token_ids": [0] * (MAX_ALLOWED_TOKENS + 1)},
    *(
        {"structured_output": session_pb2.StructuredOutput(**form)}
        for form in (
            {},
            {"regex": ""},
            {"json_schema": " " * 65_537},
            *(
                {"choices": session_pb2.StructuredOutputChoices(texts=texts)}
                for texts in ([], ["a", ""], ["a", "a"], map(str, range(1_025)))
            ),
        )
    ),
]
"""Sampling parameters, which are refused by name."""
NO_TOP = {"num_top": 1, "token_ids": bytes(8), "logprobs": bytes(8)}
BAD_LOGPROBS: list[dict[str, Any]] = [
    {"logprobs": [-1.0]},
    {"logprobs": [-1.0, math.nan]},
    {"top_logprobs": NO_TOP, "logprobs": []},
    *(
        {"top_logprobs": NO_TOP | change}
        for change in (
            {"token_ids": bytes(4)},
            {"logprobs": bytes(9)},
            {"num_top": 2},
            {"logprobs": b"\x00\x00\xc0\x7f" * 2},
            {"num_top": 21, "token_ids": bytes(168), "logprobs": bytes(168)},
            {"num_top": 2**32 - 1, "token_ids": b"", "logprobs": b""},
        )
    ),
]
NO_SPAN = ("x", f"00-{1:032x}-{0:016x}-01", f"01-{1:032x}-{1:016x}-01", f"00-{1:032x}-{1:016x}-01" + 10**6 * "0")
"""Nonsense, no span, another version, endless."""
REFUSED: list[tuple[type, Message, str]] = [
    *((SamplingParams, session_pb2.SamplingParameters(**values), next(iter(values))) for values in OUT_OF_RANGE),
    *((Verdict, changed(BARE_VERDICT, **values), "log-probabilit") for values in BAD_LOGPROBS),
    *(
        (Verdict, messages.verdict_to_proto(replace(VERDICT, logprobs=LogprobsPart(draft=values))), "drafter")
        for values in ([0.5, -1.0, -1.0], [-1.0], [-1.0] * 4)
    ),
    *(
        (Verdict, changed(messages.verdict_to_proto(VERDICT), extra_token_kind=kind), "extra token")
        for kind in (session_pb2.EXTRA_TOKEN_KIND_UNSPECIFIED, 99)
    ),
    (TargetSessionSpec, changed(TARGET, logprobs=21), r"^logprobs must be in 0..20"),
    (TargetSessionSpec, changed(TARGET, prompt_logprobs=2**32 - 1), "prompt_logprobs must be in 0..20"),
    (TargetSessionSpec, changed(TARGET, max_held_blocks=MAX_BRANCHES + 1), "max_held_blocks is at most 32"),
    (DraftSessionSpec, changed(DRAFT, max_branches=MAX_BRANCHES + 1), "max_branches is at most 32"),
    (DraftSessionSpec, changed(DRAFT, max_held_blocks=MAX_BRANCHES + 1), "max_held_blocks is at most 32"),
    (DraftSessionSpec, changed(DRAFT, max_tree_nodes=MAX_TREE_NODES + 1), "max_tree_nodes is at most 64"),
    (Calibration, drafter_pb2.Calibration(max_rounds_ahead=MAX_ROUNDS_AHEAD + 1), "max_rounds_ahead is at most 2"),
    (TargetSessionSpec, changed(TARGET, logprobs_mode="Raw"), "logprobs_mode must be raw or processed"),
    *(
        (Calibration, drafter_pb2.Calibration(stop_below=value), "^stop_below must be in 0..1, not")
        for value in (-0.1, 1.1, 2.0, math.nan, math.inf)
    ),
    *(
        (Verdict, changed(BARE_VERDICT, num_draft_tokens=2, confidence_buckets=buckets), "confidence")
        for buckets in (b"\1", b"\1\2\3\4", b"\1\10", bytes(10**6))
    ),
    *(
        (
            kind,
            changed(message, parameters=changed(message.parameters, traceparent=header)),
            r"^traceparent is not one of W3C Trace Context, version 00$",
        )
        for kind, message in ((TargetSessionSpec, TARGET), (DraftSessionSpec, DRAFT))
        for header in NO_SPAN
    ),
    *((TargetSessionSpec, changed(TARGET, verifying_key=bytes(size)), "16 bytes") for size in (0, 15, 17, 32)),
    *((DraftSessionSpec, changed(DRAFT, drafting_key=bytes(size)), "16 bytes") for size in (0, 15, 17, 32)),
    *((TargetSessionSpec, changed(TARGET, permit_key=bytes(size)), "16 bytes") for size in (15, 17, 32)),
    *(
        (DraftSessionSpec, changed(DRAFT, permit=session_pb2.DraftPermit(token=bytes(size))), "permit")
        for size in (0, 15, 17)
    ),
    *(
        (Calibration, drafter_pb2.Calibration(permit=session_pb2.DraftPermit(token=bytes(size))), "permit")
        for size in (0, 15, 17)
    ),
]


def test_session_without_branches_is_not_drafted_ahead_for() -> None:
    spec = messages.draft_spec_from_proto(sent(changed(DRAFT, max_branches=0, max_held_blocks=4)))
    assert spec.ahead is None
    spec = messages.draft_spec_from_proto(sent(changed(DRAFT, max_branches=2, max_held_blocks=0)))
    assert spec.ahead == BranchLimits(2)


def test_malformed_message_is_refused_by_the_name_of_what_is_wrong() -> None:
    for kind, message, name in REFUSED:
        with pytest.raises(InvalidRequestError, match=name):
            pytest.fail(f"accepted: {WIRE[kind][2](sent(message))}")


def test_model_with_too_long_a_description_is_refused_before_it_is_parsed() -> None:
    rules = [session_pb2.VerificationRule(name="\N{GRINNING FACE}")] * (messages.MAX_SAID + 1)
    for much, said in (
        ({"rules": rules}, "rules: a model has at most 64"),
        ({"capabilities": [""] * (messages.MAX_SAID + 1)}, "capabilities: a model has at most 64"),
        ({"capabilities": ["x" * 257]}, "at most 256 characters"),
        ({"name": "x" * 257}, "at most 256 characters"),
        ({"rules": rules[:1]}, "letters, digits"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            messages.model_from_proto(changed(messages.model_to_proto(MODEL), **much))
    other = changed(messages.model_to_proto(MODEL), rules=rules, protocol_version=9, oldest_protocol_version=0)
    with pytest.raises(ModelMismatchError, match="protocol version 9"):  # whatever else is wrong
        messages.model_from_proto(other)


def test_unknown_number_of_the_drafter_survives_the_wire() -> None:
    message = messages.verdict_to_proto(replace(VERDICT, logprobs=LogprobsPart(draft=[math.nan] * 3)))
    read = messages.verdict_from_proto(sent(message)).logprobs
    assert read is not None
    assert all(map(math.isnan, read.draft))


def tree_block(parents: list[int], tokens: list[int], rows: list[list[tuple[int, int]]]) -> session_pb2.DraftBlock:
    """Returns a block that is a tree, with ids and weights of each of its rows; none are sent without rows."""
    distributions = DraftDistributions(Encoding.NONE, VOCAB_SIZE)
    if rows:
        ids, weights = (np.array([[entry[part] for entry in row] for row in rows]) for part in (0, 1))
        (distributions,) = encode_sparse(Supports(ids, weights, VOCAB_SIZE), [len(rows)])
    return messages.block_to_proto(DraftBlock(FENCE, tokens, distributions, parents=tuple(parents)))


HALF, QUARTER = 2**15, 2**14
ROWS = [[(7, HALF), (9, QUARTER), (300, QUARTER)], [(5, HALF), (7, HALF), (9, 0)]]


def test_tree_travels_with_a_distribution_for_each_token_that_has_children() -> None:
    whole = tree_block([-1, -1, 1, 1], [300, 9, 7, 5], ROWS)
    bare = tree_block([-1, -1, 1, 1], [300, 300, 319, 5], [])
    first, second, chain = received(whole, bare, messages.block_to_proto(BLOCK))
    assert first.tree == second.tree == TokenTree((-1, -1, 1, 1))
    assert (first.has_distributions, second.has_distributions, chain.tree) == (True, False, None)
    assert (first.depth, chain.depth) == (2, 2)
    assert isinstance(first.draft, Supports)
    assert isinstance(second.draft, Supports), "any tokens, also the same twice"
    assert rows_of(first.draft).dense().shape == (2, VOCAB_SIZE)
    assert first.draft.weights[:2].tolist() == [[weight for _, weight in row] for row in ROWS]


@pytest.mark.parametrize(
    ("block", "violation", "said"),
    [
        (tree_block([-1, 1], [1, 2], []), Violation.ENCODING, "before it"),
        (tree_block([-2, -1], [1, 2], []), Violation.ENCODING, "before it"),
        (tree_block([-1, -1, 0], [1, 2], []), Violation.ENCODING, "as many parents"),
        (tree_block([-1] * (MOST_NODES + 1), [1] * (MOST_NODES + 1), []), Violation.LENGTH, f"is {MOST_NODES}"),
        (tree_block([-1] * 2**20, [1], []), Violation.ENCODING, "as many parents"),
        (tree_block([-1, -1], [1, 320], []), Violation.TOKEN_ID, "beyond"),
        (tree_block([-1, -1, 1, 1], [300, 9, 7, 5], ROWS[:1]), Violation.ENCODING, "for 2 distributions"),
        (tree_block([-1, -1, 1, 1], [300, 9, 7, 5], [*ROWS, ROWS[0]]), Violation.ENCODING, "for 2 distributions"),
        (tree_block([-1, -1, 1, 1], [300, 9, 7, 5], ROWS[::-1]), Violation.OUTSIDE_SUPPORT, "probability 0"),
        (tree_block([-1, -1, 0, 0], [9, 7, 5, 300], ROWS), Violation.OUTSIDE_SUPPORT, "probability 0"),
        (tree_block([-1, -1, 1, 1], [9, 9, 7, 5], ROWS), Violation.TOKEN_ID, "drawn twice"),
        (
            session_pb2.DraftBlock(
                token_ids=[1],
                parent_indices=[-1],
                distributions=session_pb2.DraftDistributions(
                    encoding=session_pb2.DISTRIBUTION_ENCODING_ONE_HOT, vocab_size=4
                ),
            ),
            Violation.ENCODING,
            "all certain",
        ),
    ],
)
def test_tree_that_nobody_can_have_drawn_is_refused(
    block: session_pb2.DraftBlock, violation: Violation, said: str
) -> None:
    refused = refusal(block)
    assert (refused.violation, said in str(refused)) == (violation, True), refused
    first, good = received(block, messages.block_to_proto(BLOCK))
    assert isinstance(first.draft, BlockViolationError)
    assert isinstance(good.draft, Supports)


def test_trees_are_refused_unless_accepted_and_dense_ones_are_decoded() -> None:
    block = tree_block([-1, -1, 1, 1], [300, 9, 7, 5], ROWS)
    (refused,) = messages.blocks_from_proto([block], DRAFTER_ID, VOCAB_SIZE, MAX_DRAFT_TOKENS)
    assert isinstance(refused.draft, BlockViolationError)
    assert str(refused.draft) == "token trees are not accepted"
    probs = np.zeros((2, VOCAB_SIZE), np.float32)
    probs[0, [300, 9]], probs[1, [7, 5]] = 0.5, 0.5
    dense = encode_dense(Encoding.DENSE_FLOAT32, probs)
    for tokens, is_right in (([300, 9, 7, 5], True), ([300, 9, 7, 9], False)):
        sent_block = messages.block_to_proto(DraftBlock(FENCE, tokens, dense, parents=(-1, -1, 1, 1)))
        (decoded,) = received(sent_block)
        assert isinstance(decoded.draft, DenseProbs) is is_right


def test_tree_that_is_to_be_drafted_has_a_size_and_an_order() -> None:
    for tree, said in (
        (drafter_pb2.DraftTree(), "has 1 to 64 tokens, not 0"),
        (drafter_pb2.DraftTree(num_nodes=65), "not 65"),
        (drafter_pb2.DraftTree(num_nodes=3, parent_indices=[-1, -1]), "as many parents"),
        (drafter_pb2.DraftTree(num_nodes=2, parent_indices=[-1, 1]), "before it"),
        (drafter_pb2.DraftTree(num_nodes=3, parent_indices=[-1, 0, -1]), "depth by depth"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            messages.calibration_from_proto(drafter_pb2.Calibration(tree=tree))


def test_block_is_refused_for_its_fault_and_says_no_tokens_but_whose_it_is() -> None:
    good, none = messages.block_to_proto(BLOCK), session_pb2.DISTRIBUTION_ENCODING_NONE
    tree = wire_block(encoding=session_pb2.DISTRIBUTION_ENCODING_ONE_HOT)
    longest = wire_block(MAX_DRAFT_TOKENS, encoding=none)
    assert all(isinstance(block.draft, Supports) for block in received(tree, longest, good))
    tree.parent_indices.extend([-1, -1])
    unstated = [wire_block(encoding=encoding) for encoding in (0, 6, 99, -1)]
    for block, violation, text in (
        *((block, Violation.ENCODING, "encoding") for block in unstated),
        (session_pb2.DraftBlock(token_ids=[1]), Violation.ENCODING, ""),
        (tree, Violation.ENCODING, "parents"),
        (wire_block(MAX_DRAFT_TOKENS + 1, encoding=none), Violation.LENGTH, str(MAX_DRAFT_TOKENS)),
    ):
        refused = changed(block, fence=good.fence)
        first, second_block = received(refused, good)
        assert isinstance(first.draft, BlockViolationError)
        assert (first.draft.violation, text in str(first.draft)) == (violation, True)
        assert (first.fence, first.token_ids, first.drafter_id) == (FENCE, [], DRAFTER_ID)
        assert isinstance(second_block.draft, Supports)


@pytest.mark.parametrize("name", ["support_sizes", "wide_sizes"])
def test_support_sizes_beyond_the_limit_are_refused_without_taking_memory(name: str) -> None:
    """In memory a large one takes 18 times what it takes on the wire."""
    sparse = session_pb2.DISTRIBUTION_ENCODING_SPARSE_UINT16
    block = sent(wire_block(encoding=sparse, **{name: [1_000] * 1_000_000}))
    tracemalloc.start()
    (refused,) = messages.blocks_from_proto([block], DRAFTER_ID, VOCAB_SIZE, MAX_DRAFT_TOKENS, MOST_NODES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(refused.draft, BlockViolationError)
    assert refused.draft.violation is Violation.ENCODING
    assert peak < 2**20
