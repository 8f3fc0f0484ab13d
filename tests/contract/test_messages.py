"""What services say to each other survives the wire, and its bytes do not change by accident."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire.encoding import DenseProbs, DraftDistributions, Supports, encode_dense
from draftwire.errors import BlockViolationError, InvalidRequestError, NoRoomError, Violation
from draftwire.logprobs import MAX_LOGPROBS, LogprobsMode, LogprobsRequest, PromptPart, TokenLogprob
from draftwire.models.description import PROTOCOL_VERSION, ModelDescription
from draftwire.parameters import MAX_ALLOWED_TOKENS, MAX_BIASED_TOKENS, PARAMETERS, SamplingParams
from draftwire.quantization import Encoding
from draftwire.rounds import (
    Calibration,
    DraftBlock,
    DraftSessionSpec,
    DraftTimings,
    Fence,
    Permit,
    PlainRun,
    PromptRead,
    ReceivedBlock,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.services.gateway.choices import ChoiceEvent, PromptEcho
from draftwire.services.gateway.loop import Delta, Finish, FinishReason
from draftwire.services.gateway.request import Generation
from draftwire.services.gateway.server import _event_to_proto as gateway_event_to_proto
from draftwire.services.gateway.server import _statistics_to_proto
from draftwire.services.gateway.statistics import Statistics
from draftwire.services.rpc import messages
from draftwire.services.rpc.status import error_of_number
from draftwire.services.verifier.core import BlockRefused
from draftwire.services.verifier.server import _event_to_proto
from draftwire.structured_output import StructuredOutput
from draftwire.token_source import TokenSource
from draftwire.trace_context import TraceContext
from draftwire.v1 import drafter_pb2, gateway_pb2, model_pb2, session_pb2, verifier_pb2

UNHURRIED = settings(deadline=None)  # the machine may be busy
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
IDS = st.lists(UINT32, max_size=12)
KEYS = st.binary(min_size=16, max_size=16)
TEXT = st.text(max_size=20)
DRAFTER_ID, VOCAB_SIZE, MAX_DRAFT_TOKENS = 2**64 - 5, 320, 8

FENCES = st.builds(Fence, session_id=UINT64, epoch=UINT32, round=UINT32, prefix_len=UINT32, prefix_hash=UINT64)
TIMINGS = st.builds(DraftTimings, calibration_us=UINT32, draft_us=UINT32)
PERMITS = st.builds(Permit, number=UINT32, token=KEYS)
PENALTIES = st.floats(-2.0, 2.0)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 100.0),
    top_k=UINT32,
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.0, 100.0, exclude_min=True),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    logit_bias=st.dictionaries(UINT32, st.floats(-100.0, 100.0), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    allowed_token_ids=st.none() | st.lists(UINT32, min_size=1, max_size=4).map(tuple),
    min_tokens=UINT32,
)
DISTRIBUTIONS = st.builds(
    DraftDistributions,
    encoding=st.sampled_from(Encoding),
    vocab_size=UINT32,
    data=st.binary(max_size=40),
    support_sizes=st.lists(UINT32, max_size=6).map(tuple),
    wide_sizes=st.lists(UINT32, max_size=6).map(tuple),
)
"""Any: what is said is checked after the wire."""
COUNTS = st.none() | st.integers(0, MAX_LOGPROBS)
LOGPROBS_REQUESTS = st.builds(
    LogprobsRequest, logprobs=COUNTS, prompt_logprobs=COUNTS, mode=st.sampled_from(LogprobsMode)
)
FINITE = st.floats(max_value=0.0, width=32, allow_infinity=False, allow_nan=False)
TOKEN_LOGPROBS = st.builds(
    TokenLogprob,
    token_id=UINT32,
    logprob=FINITE | st.just(-math.inf),
    top=st.lists(st.tuples(UINT32, FINITE), max_size=MAX_LOGPROBS),
)
PROMPT_READS = st.builds(
    PromptRead,
    session_id=UINT64,
    epoch=UINT32,
    part=st.builds(PromptPart, first_position=UINT32, tokens=st.lists(TOKEN_LOGPROBS, max_size=5)),
)
TRACEPARENTS = st.just("") | st.builds(
    TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans()
).map(str)
TARGET_SPECS = st.builds(
    TargetSessionSpec,
    session_id=UINT64,
    epoch=UINT32,
    first_round=UINT32,
    choice=UINT32,
    token_ids=IDS,
    prompt_len=UINT32,
    sampling=SAMPLING,
    rule=TEXT,
    verifying_key=KEYS,
    max_draft_tokens=UINT32,
    plain_rounds=UINT32,
    stop_token_ids=st.frozensets(UINT32, max_size=6),
    max_len=UINT32,
    cache_salt=TEXT,
    permit_key=st.just(b"") | KEYS,
    logprobs=LOGPROBS_REQUESTS,
    traceparent=TRACEPARENTS,
)
DRAFT_SPECS = st.builds(
    DraftSessionSpec,
    session_id=UINT64,
    epoch=UINT32,
    choice=UINT32,
    token_ids=IDS,
    prompt_len=UINT32,
    sampling=SAMPLING,
    rule=TEXT,
    drafting_key=KEYS,
    stop_token_ids=st.frozensets(UINT32, max_size=6),
    verifier_address=TEXT,
    target_vocab_size=UINT32,
    max_draft_tokens=UINT32,
    max_len=UINT32,
    permit=PERMITS,
    cache_salt=TEXT,
    traceparent=TRACEPARENTS,
)

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
    attempt=2,
    timings=DraftTimings(calibration_us=10, draft_us=200),
    permit=Permit.make(bytes(range(16)), 300),
)
GOLDEN_PERMIT = bytes.fromhex(
    "08 ac02"  # 1: number, varint 300
    "12 10 9f7af5d478a6b3a50e33baba94f046cb"  # 2: token: BLAKE2b-128 of 2c010000 under the key 000102..0f
)
GOLDEN_BLOCK_START = (
    bytes.fromhex("0a 19")  # 1: fence, 25 bytes
    + GOLDEN_FENCE
    + bytes.fromhex(
        "10 02"  # 2: attempt
        "1a 03 07ac02"  # 3: token_ids, packed
    )
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
TARGET_SPEC = TargetSessionSpec(
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
GOLDEN_TARGET_SPEC = bytes.fromhex(
    "09 0a00000000000000"  # 1: lease_id, fixed64 little-endian
    "11 0100000000000000"  # 2: session_id, fixed64 little-endian
    "18 02"  # 3: epoch
    "20 03"  # 4: first_round
    "28 04"  # 5: choice
    "32 03 07ac02"  # 6: token_ids, packed
    "38 01"  # 7: prompt_len
    f"42 3a {GOLDEN_SAMPLING}"  # 8: sampling
    "4a 05 626c6f636b"  # 9: rejection_sample_method
    "52 10 000102030405060708090a0b0c0d0e0f"  # 10: verifying_key
    "58 05"  # 11: max_draft_tokens
    "60 06"  # 12: plain_rounds
    "6a 02 0809"  # 13: stop_token_ids, packed, ascending
    "70 9003"  # 14: max_len
    "7a 04 73616c74"  # 15: cache_salt
    "8a01 10 101112131415161718191a1b1c1d1e1f"  # 17: permit_key
)
DRAFT_SPEC = DraftSessionSpec(
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
    "20 04"  # 4: choice
    "2a 03 07ac02"  # 5: token_ids, packed
    "30 01"  # 6: prompt_len
    f"3a 3a {GOLDEN_SAMPLING}"  # 7: sampling
    "42 10 000102030405060708090a0b0c0d0e0f"  # 8: drafting_key
    "4a 03 763a31"  # 9: verifier_address
    "50 c002"  # 10: target_vocab_size
    "58 05"  # 11: max_draft_tokens
    "60 9003"  # 12: max_len
    "6a 04 73616c74"  # 13: cache_salt
    "72 05 626c6f636b"  # 14: rejection_sample_method
    "7a 02 0809"  # 15: stop_token_ids, packed, ascending
    f"8201 15 {GOLDEN_PERMIT.hex()}"  # 16: permit, 21 bytes
)
GOLDEN_SEND_DRAFTED = bytes.fromhex(
    "09 8877665544332211"  # 1: session_id, fixed64 little-endian
    "10 01"  # 2: epoch
    "18 ac02"  # 3: round, varint 300
    "20 02"  # 4: attempt
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
)
SECOND_CHOICE = Generation([1], SamplingParams(), 4, (), frozenset(), 5, 4, "token", choice=1)
GOLDEN_MODEL = bytes.fromhex(
    "08 09"  # 1: protocol_version
    "12 01 6d"  # 2: name
    "1a 01 72"  # 3: revision
    "22 07 666c6f61743332"  # 4: dtype
    "2a 02 0102"  # 5: vocabulary_fingerprint
    "30 ac02"  # 6: vocab_size
    "38 9003"  # 7: context_length
    "42 02 0809"  # 8: stop_token_ids, packed
    "4a 02 0304"  # 9: weights_fingerprint
)


def sent(message: Message) -> Message:
    """Returns what a peer receives."""
    return type(message).FromString(message.SerializeToString())


def wire_block(tokens: int = 1, **changes: object) -> session_pb2.DraftBlock:
    stated = session_pb2.DraftDistributions(**({"vocab_size": 4} | changes))
    return session_pb2.DraftBlock(token_ids=[1] * tokens, distributions=stated)


def received(*blocks: session_pb2.DraftBlock) -> list[ReceivedBlock]:
    return messages.blocks_from_proto([sent(block) for block in blocks], DRAFTER_ID, VOCAB_SIZE, MAX_DRAFT_TOKENS)


def refusal(block: session_pb2.DraftBlock) -> BlockViolationError:
    (refused,) = received(block)
    assert isinstance(refused.draft, BlockViolationError)
    return refused.draft


@given(FENCES)
@UNHURRIED
def test_fence_survives_the_wire(fence: Fence) -> None:
    assert messages.fence_from_proto(sent(messages.fence_to_proto(fence))) == fence


@pytest.mark.parametrize("number", [0, 1, 2**63, 2**64 - 1])
def test_fence_carries_all_64_bits_of_id_and_hash(number: int) -> None:
    fence = Fence(number, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**64 - 1 - number)
    assert messages.fence_from_proto(sent(messages.fence_to_proto(fence))) == fence


@given(SAMPLING)
@UNHURRIED
def test_sampling_parameters_survive_the_wire_to_the_bit(params: SamplingParams) -> None:
    assert messages.sampling_from_proto(sent(messages.sampling_to_proto(params))) == params


FORMS = [
    StructuredOutput.json({"type": "object"}),
    StructuredOutput.regex("[0-9]+é"),
    StructuredOutput.choice(["b", "a", "\n"]),
    StructuredOutput.grammar('start: "a"'),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.form.value)
def test_forms_survive_the_wire_in_order(form: StructuredOutput) -> None:
    params = SamplingParams(structured_output=form)
    assert messages.sampling_from_proto(sent(messages.sampling_to_proto(params))) == params


@pytest.mark.parametrize(
    "message",
    [
        session_pb2.StructuredOutput(),
        session_pb2.StructuredOutput(regex=""),
        session_pb2.StructuredOutput(choices=session_pb2.StructuredOutputChoices()),
        session_pb2.StructuredOutput(choices=session_pb2.StructuredOutputChoices(texts=["a", ""])),
        session_pb2.StructuredOutput(choices=session_pb2.StructuredOutputChoices(texts=["a", "a"])),
        session_pb2.StructuredOutput(choices=session_pb2.StructuredOutputChoices(texts=map(str, range(1_025)))),
        session_pb2.StructuredOutput(json_schema=" " * 65_537),
    ],
)
def test_forms_that_are_empty_repeated_or_too_large_are_refused(message: session_pb2.StructuredOutput) -> None:
    with pytest.raises(InvalidRequestError, match="structured_output"):
        messages.sampling_from_proto(session_pb2.SamplingParameters(structured_output=message))


def test_absent_sampling_parameters_get_their_defaults() -> None:
    assert messages.sampling_from_proto(session_pb2.SamplingParameters()) == SamplingParams()


def test_sampling_parameters_are_sent_even_where_they_are_zero() -> None:
    message = sent(messages.sampling_to_proto(SamplingParams(temperature=0.0, top_k=0, top_p=1.0)))
    names = [name for name in PARAMETERS if name not in ("logit_bias", "allowed_token_ids", "structured_output")]
    assert all(message.HasField(name) for name in names)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_sampling_parameter_has_a_field_of_its_name(name: str) -> None:
    assert name in session_pb2.SamplingParameters.DESCRIPTOR.fields_by_name


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": 100.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": {3: 100.5}},
    ],
    ids=str,
)
def test_sampling_parameter_out_of_range_is_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(values))):
        messages.sampling_from_proto(session_pb2.SamplingParameters(**values))


def test_more_biases_or_allowed_tokens_than_any_vocabulary_needs_are_refused_at_once() -> None:
    biased = session_pb2.SamplingParameters(logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0))
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        messages.sampling_from_proto(biased)
    allowed = session_pb2.SamplingParameters(allowed_token_ids=[0] * (MAX_ALLOWED_TOKENS + 1))
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        messages.sampling_from_proto(allowed)


@given(FENCES, IDS, DISTRIBUTIONS, UINT32, TIMINGS, st.none() | PERMITS)
@UNHURRIED
def test_draft_block_travels_with_all_it_says(
    fence: Fence,
    ids: list[int],
    distributions: DraftDistributions,
    attempt: int,
    timings: DraftTimings,
    permit: Permit | None,
) -> None:
    message = sent(messages.block_to_proto(DraftBlock(fence, ids, distributions, attempt, timings, permit)))
    assert list(message.token_ids) == ids
    assert message.distributions.vocab_size == distributions.vocab_size
    assert message.distributions.data == distributions.data
    assert tuple(message.distributions.support_sizes) == distributions.support_sizes
    assert tuple(message.distributions.wide_sizes) == distributions.wide_sizes
    (block,) = messages.blocks_from_proto([message], DRAFTER_ID, VOCAB_SIZE, MAX_DRAFT_TOKENS)
    assert (block.fence, block.attempt, block.timings, block.drafter_id) == (fence, attempt, timings, DRAFTER_ID)
    assert block.permit == permit
    assert block.has_distributions == (distributions.encoding is not Encoding.NONE)


@given(st.lists(st.tuples(FENCES, st.sampled_from(Encoding), st.integers(0, 3)), max_size=6))
@UNHURRIED
def test_blocks_of_one_message_keep_their_order_and_what_was_drawn_from(
    parts: list[tuple[Fence, Encoding, int]],
) -> None:
    """Good blocks of all encodings, and some without tokens, which are wrong."""
    blocks = []
    for fence, encoding, length in parts:
        distributions = DraftDistributions(encoding, 4)
        if encoding is Encoding.SPARSE_UINT16:
            data = bytes([3, 1] * length) + bytes.fromhex("fe00") * length + bytes.fromhex("ff") * length
            distributions = DraftDistributions(encoding, 4, data, (2,) * length, (1,) * length)
        elif encoding in (Encoding.DENSE_FLOAT32, Encoding.DENSE_FLOAT16):
            distributions = encode_dense(encoding, np.array([[0.0, 0.25, 0.25, 0.5]] * length).reshape(length, 4))
        blocks.append(DraftBlock(fence, [3] * length, distributions))
    for (fence, encoding, length), block in zip(
        parts, received(*(messages.block_to_proto(block) for block in blocks)), strict=True
    ):
        assert (block.fence, block.drafter_id) == (fence, DRAFTER_ID)
        if not length:
            assert isinstance(block.draft, BlockViolationError)
            assert block.draft.violation is Violation.LENGTH
            continue
        assert block.token_ids == [3] * length
        if isinstance(block.draft, DenseProbs):
            assert encoding in (Encoding.DENSE_FLOAT32, Encoding.DENSE_FLOAT16)
            assert block.draft.probs[:, :4].tolist() == [[0.0, 0.25, 0.25, 0.5]] * length
        else:
            assert isinstance(block.draft, Supports)
            expected = {3: 65_535, 1: 1} if encoding is Encoding.SPARSE_UINT16 else {3: 65_536}
            for ids, weights in zip(block.draft.token_ids.tolist(), block.draft.weights.tolist(), strict=True):
                assert {token: weight for token, weight in zip(ids, weights, strict=True) if weight} == expected


@pytest.mark.parametrize("encoding", Encoding)
def test_every_encoding_has_a_number_of_its_name_on_the_wire(encoding: Encoding) -> None:
    message = sent(messages.block_to_proto(DraftBlock(FENCE, [1], DraftDistributions(encoding, 4))))
    name = session_pb2.DistributionEncoding.Name(message.distributions.encoding)
    assert name == f"DISTRIBUTION_ENCODING_{encoding.name}"


def test_block_of_the_longest_length_is_read_and_one_more_is_not() -> None:
    none = session_pb2.DISTRIBUTION_ENCODING_NONE
    (block,) = received(wire_block(MAX_DRAFT_TOKENS, encoding=none))
    assert isinstance(block.draft, Supports)
    error = refusal(wire_block(MAX_DRAFT_TOKENS + 1, encoding=none))
    assert error.violation is Violation.LENGTH
    assert str(MAX_DRAFT_TOKENS) in str(error)


def test_refused_block_says_no_tokens_but_whose_it_is() -> None:
    good = messages.block_to_proto(BLOCK)
    bad = messages.block_to_proto(BLOCK)
    bad.distributions.encoding = session_pb2.DISTRIBUTION_ENCODING_UNSPECIFIED
    first, second = received(bad, good)
    assert (first.fence, first.attempt, first.token_ids, first.drafter_id) == (FENCE, 2, [], DRAFTER_ID)
    assert isinstance(first.draft, BlockViolationError)
    assert isinstance(second.draft, Supports)


@given(
    st.builds(
        Verdict,
        fence=FENCES,
        token_ids=IDS,
        num_draft_tokens=UINT32,
        num_accepted_tokens=UINT32,
        extra=st.sampled_from(sorted(set(TokenSource) - {TokenSource.ACCEPTED}, key=str)),
        plain_rounds_left=UINT32,
        verify_us=UINT32,
        queue_us=UINT32,
        timings=TIMINGS,
        num_near_ties=UINT32,
        num_cached_tokens=UINT32,
    )
)
@UNHURRIED
def test_verdict_survives_the_wire(verdict: Verdict) -> None:
    assert messages.verdict_from_proto(sent(messages.verdict_to_proto(verdict))) == verdict


@given(st.lists(TOKEN_LOGPROBS, max_size=5))
@UNHURRIED
def test_log_probabilities_of_a_verdict_survive_the_wire(tokens: list[TokenLogprob]) -> None:
    verdict = Verdict(FENCE, [token.token_id for token in tokens], 0, 0, TokenSource.PLAIN, 0, logprobs=tokens)
    assert messages.verdict_from_proto(sent(messages.verdict_to_proto(verdict))) == verdict


@given(PROMPT_READS)
@UNHURRIED
def test_log_probabilities_of_a_prompt_survive_the_wire(read: PromptRead) -> None:
    assert messages.prompt_read_from_proto(sent(messages.prompt_read_to_proto(read))) == read


def test_log_probabilities_have_their_golden_bytes() -> None:
    verdict = replace(VERDICT, token_ids=[300, 300], logprobs=REPORTED)
    message = messages.verdict_to_proto(verdict)
    own = bytes.fromhex("6a 08 000080bf 00000000")  # 13: logprobs, packed float32
    top = bytes.fromhex("72 26") + GOLDEN_TOP  # 14: top_logprobs, 38 bytes
    assert message.SerializeToString(deterministic=True).endswith(own + top)
    assert messages.verdict_from_proto(sent(message)) == verdict
    delta = gateway_event_to_proto(ChoiceEvent(SECOND_CHOICE, Delta([300, 300], "", REPORTED))).delta
    own, top = bytes.fromhex("22 08 000080bf 00000000"), bytes.fromhex("2a 26") + GOLDEN_TOP
    assert delta.SerializeToString(deterministic=True) == bytes.fromhex("08 01 12 04 ac02ac02") + own + top
    prompt = gateway_event_to_proto(ChoiceEvent(SECOND_CHOICE, PromptPart(300, REPORTED)))
    start = bytes.fromhex("1a 3d 08 01 10 ac02 1a 04 ac02ac02")  # 3: prompt_logprobs: choice, position, ids
    assert prompt.SerializeToString(deterministic=True) == start + own + top
    read = PromptRead(FENCE.session_id, 1, PromptPart(300, REPORTED))
    event = _event_to_proto(read)
    start = bytes.fromhex("2a 46 09 8877665544332211 10 01 18 ac02 22 04 ac02ac02")  # 5: prompt_read, 1 to 4 of it
    own, top = bytes.fromhex("2a 08 000080bf 00000000"), bytes.fromhex("32 26") + GOLDEN_TOP
    assert event.SerializeToString(deterministic=True) == start + own + top


def test_details_of_tokens_have_their_golden_bytes() -> None:
    verdict = replace(VERDICT, draft_logprobs=[-1.0, 0.0, -math.inf])
    message = messages.verdict_to_proto(verdict)
    given = bytes.fromhex("0c 000080bf 00000000 000080ff")
    assert message.SerializeToString(deterministic=True).endswith(b"\x7a" + given)  # 15: packed float32
    assert messages.verdict_from_proto(sent(message)) == verdict
    event = Delta([7, 7, 7], "ab", [], verdict.sources, 4, verdict.draft_logprobs, [1, 0, 1])
    delta = gateway_event_to_proto(ChoiceEvent(SECOND_CHOICE, event)).delta
    start = bytes.fromhex("0801 1203 070707 1a02 6162")
    details = bytes.fromhex("3203 010102 3804 42") + given + bytes.fromhex("4a03 010001")  # 6 to 9
    assert delta.SerializeToString(deterministic=True) == start + details
    plain = Delta([7], "", [], [TokenSource.PLAIN], 0)
    sources = [TokenSource.BONUS, TokenSource.PLAIN]
    numbers = [
        gateway_event_to_proto(ChoiceEvent(SECOND_CHOICE, replace(plain, sources=[source]))).delta.token_sources
        for source in sources
    ]
    assert [list(number) for number in numbers] == [[3], [4]]


@pytest.mark.parametrize("values", [[0.5, -1.0, -1.0], [-1.0], [-1.0] * 4])
def test_what_drafters_gave_is_refused_where_it_does_not_fit(values: list[float]) -> None:
    message = messages.verdict_to_proto(replace(VERDICT, draft_logprobs=values))
    with pytest.raises(InvalidRequestError, match="drafter"):
        messages.verdict_from_proto(sent(message))


def test_unknown_number_of_the_drafter_survives_the_wire() -> None:
    message = messages.verdict_to_proto(replace(VERDICT, draft_logprobs=[math.nan] * 3))
    assert all(map(math.isnan, messages.verdict_from_proto(sent(message)).draft_logprobs))


def test_wishes_for_details_and_traces_have_their_golden_bytes() -> None:
    spec = replace(TARGET_SPEC, reports_draft_logprobs=True, traceparent=TRACEPARENT)
    end = bytes.fromhex("a80101 b20137") + TRACEPARENT.encode()  # 21: draft_logprobs, 22: traceparent
    message = messages.target_spec_to_proto(spec, lease_id=10)
    assert message.SerializeToString(deterministic=True) == GOLDEN_TARGET_SPEC + end
    assert messages.target_spec_from_proto(sent(message)) == spec
    draft_spec = replace(DRAFT_SPEC, traceparent=TRACEPARENT)
    of_drafter = messages.draft_spec_to_proto(draft_spec, lease_id=10)
    assert (
        of_drafter.SerializeToString(deterministic=True)
        == GOLDEN_DRAFT_SPEC + bytes.fromhex("8a0137") + TRACEPARENT.encode()
    )
    assert messages.draft_spec_from_proto(sent(of_drafter)) == draft_spec


def test_echo_and_end_of_a_choice_have_their_golden_bytes() -> None:
    echo = gateway_event_to_proto(ChoiceEvent(SECOND_CHOICE, PromptEcho([7, 300], "ab")))
    expected = "220b" + "0801" + "120307ac02" + "1a026162"  # 4: prompt_echo: choice, packed ids, text
    assert echo.SerializeToString(deterministic=True).hex() == expected
    finish = gateway_event_to_proto(ChoiceEvent(SECOND_CHOICE, Finish(FinishReason.LENGTH, Statistics(), "")))
    assert (finish.finish.choice, finish.finish.seed, finish.finish.rejection_sample_method) == (1, 5, "token")


def test_wish_for_log_probabilities_has_its_golden_bytes() -> None:
    spec = replace(TARGET_SPEC, logprobs=LogprobsRequest(0, 20, LogprobsMode.PROCESSED))
    message = messages.target_spec_to_proto(spec, lease_id=10)
    end = bytes.fromhex("900100 980114 a20109") + b"processed"  # 18: logprobs, 19: prompt_logprobs, 20: logprobs_mode
    assert message.SerializeToString(deterministic=True) == GOLDEN_TARGET_SPEC + end
    assert messages.target_spec_from_proto(sent(message)) == spec
    request = gateway_pb2.GenerateRequest(logprobs=0, prompt_logprobs=20, logprobs_mode="raw")
    end = bytes.fromhex("800100 880114 920103") + b"raw"  # 16, 17, 18
    assert request.SerializeToString(deterministic=True) == end


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-1.0]},
        {"logprobs": [-1.0, math.nan]},
        {"top_logprobs": {"num_top": 1, "token_ids": bytes(8), "logprobs": bytes(8)}, "logprobs": []},
        {"top_logprobs": {"num_top": 1, "token_ids": bytes(4), "logprobs": bytes(8)}},
        {"top_logprobs": {"num_top": 1, "token_ids": bytes(8), "logprobs": bytes(9)}},
        {"top_logprobs": {"num_top": 2, "token_ids": bytes(8), "logprobs": bytes(8)}},
        {"top_logprobs": {"num_top": 1, "token_ids": bytes(8), "logprobs": b"\x00\x00\xc0\x7f" * 2}},
        {"top_logprobs": {"num_top": 21, "token_ids": bytes(168), "logprobs": bytes(168)}},
        {"top_logprobs": {"num_top": 2**32 - 1, "token_ids": b"", "logprobs": b""}},
    ],
)
def test_log_probabilities_that_do_not_fit_their_tokens_are_refused(changes: dict[str, object]) -> None:
    given = {"extra_token_kind": session_pb2.EXTRA_TOKEN_KIND_PLAIN, "token_ids": [7, 8], "logprobs": [-1.0, -2.0]}
    with pytest.raises(InvalidRequestError, match="log-probabilit"):
        messages.verdict_from_proto(sent(session_pb2.Verdict(**(given | changes))))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"logprobs": 21}, "^logprobs must be in 0..20"),
        ({"prompt_logprobs": 2**32 - 1}, "prompt_logprobs must be in 0..20"),
        ({"logprobs_mode": "Raw"}, "logprobs_mode must be raw or processed"),
    ],
)
def test_wish_for_log_probabilities_that_is_out_of_range_is_refused_by_name(
    values: dict[str, object], name: str
) -> None:
    message = messages.target_spec_to_proto(TARGET_SPEC, 10)
    for field, value in values.items():
        setattr(message, field, value)
    with pytest.raises(InvalidRequestError, match=name):
        messages.target_spec_from_proto(message)


@pytest.mark.parametrize("extra", sorted(set(TokenSource) - {TokenSource.ACCEPTED}, key=str))
def test_every_kind_of_extra_token_has_a_number_on_the_wire(extra: TokenSource) -> None:
    verdict = Verdict(FENCE, [1], 0, 0, extra, 0)
    assert messages.verdict_from_proto(sent(messages.verdict_to_proto(verdict))).extra is extra


@given(st.builds(PlainRun, fence=FENCES, num_rounds=UINT32))
@UNHURRIED
def test_plain_run_survives_the_wire(run: PlainRun) -> None:
    assert messages.plain_run_from_proto(sent(messages.plain_run_to_proto(run))) == run


@given(st.builds(Calibration, fence=FENCES, base_len=UINT32, token_ids=IDS, num_draft_tokens=UINT32, attempt=UINT32))
@UNHURRIED
def test_calibration_survives_the_wire(calibration: Calibration) -> None:
    assert messages.calibration_from_proto(sent(messages.calibration_to_proto(calibration))) == calibration


@given(st.builds(SendDrafted, session_id=UINT64, epoch=UINT32, round=UINT32, attempt=UINT32))
@UNHURRIED
def test_wish_for_a_block_under_way_survives_the_wire(command: SendDrafted) -> None:
    assert messages.send_drafted_from_proto(sent(messages.send_drafted_to_proto(command))) == command


@given(TARGET_SPECS, UINT64)
@UNHURRIED
def test_target_session_survives_the_wire_with_its_lease(spec: TargetSessionSpec, lease_id: int) -> None:
    message = sent(messages.target_spec_to_proto(spec, lease_id))
    assert messages.target_spec_from_proto(message) == spec
    assert message.lease_id == lease_id


@given(DRAFT_SPECS, UINT64)
@UNHURRIED
def test_draft_session_survives_the_wire_with_its_lease(spec: DraftSessionSpec, lease_id: int) -> None:
    message = sent(messages.draft_spec_to_proto(spec, lease_id))
    assert messages.draft_spec_from_proto(message) == spec
    assert message.lease_id == lease_id


@given(
    st.builds(
        ModelDescription,
        name=TEXT,
        revision=TEXT,
        dtype=TEXT,
        vocabulary_fingerprint=st.binary(max_size=32),
        vocab_size=UINT32,
        context_length=UINT32,
        stop_token_ids=IDS.map(tuple),
        weights_fingerprint=st.binary(max_size=32),
        protocol_version=UINT32,
    )
)
@UNHURRIED
def test_model_description_survives_the_wire(model: ModelDescription) -> None:
    assert messages.model_from_proto(sent(messages.model_to_proto(model))) == model


def test_session_failure_carries_what_its_receiver_needs_to_raise_it_again() -> None:
    message = sent(messages.failure_to_proto(2**64 - 1, 3, NoRoomError("full")))
    error = error_of_number(message.status_code, message.message)
    assert (message.session_id, message.epoch) == (2**64 - 1, 3)
    assert (type(error), str(error)) == (NoRoomError, "full")


def test_fence_has_its_golden_bytes() -> None:
    assert messages.fence_to_proto(FENCE).SerializeToString(deterministic=True).hex() == GOLDEN_FENCE.hex()
    assert messages.fence_from_proto(session_pb2.Fence.FromString(GOLDEN_FENCE)) == FENCE


def test_draft_block_has_its_golden_bytes() -> None:
    assert messages.block_to_proto(BLOCK).SerializeToString(deterministic=True).hex() == GOLDEN_BLOCK.hex()
    (block,) = received(session_pb2.DraftBlock.FromString(GOLDEN_BLOCK))
    assert (block.fence, block.token_ids, block.attempt, block.timings, block.permit) == (
        *(BLOCK.fence, BLOCK.token_ids),
        *(BLOCK.attempt, BLOCK.timings, BLOCK.permit),
    )
    assert not messages.block_to_proto(replace(BLOCK, permit=None)).HasField("permit")
    assert isinstance(block.draft, Supports)
    assert block.draft.weights.tolist() == [[49_152, 16_284, 100], [65_536, 0, 0]]
    assert block.draft.vocab_size == VOCAB_SIZE
    assert block.draft.token_ids[0].tolist() == [7, 300, 5]
    assert block.draft.token_ids[1, 0] == 300


def test_dense_distributions_have_their_golden_bytes() -> None:
    rows = np.array([[0.25, 0.75], [1.0, 0.0]], dtype=np.float32)
    block = DraftBlock(FENCE, [1, 0], encode_dense(Encoding.DENSE_FLOAT32, rows))
    message = messages.block_to_proto(block).distributions
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN_DENSE.hex()


def test_verdict_has_its_golden_bytes() -> None:
    assert messages.verdict_to_proto(VERDICT).SerializeToString(deterministic=True).hex() == GOLDEN_VERDICT.hex()
    assert messages.verdict_from_proto(session_pb2.Verdict.FromString(GOLDEN_VERDICT)) == VERDICT


def test_opening_of_a_target_session_has_its_golden_bytes() -> None:
    message = messages.target_spec_to_proto(TARGET_SPEC, lease_id=10)
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN_TARGET_SPEC.hex()
    received = verifier_pb2.OpenTargetSessionRequest.FromString(GOLDEN_TARGET_SPEC)
    assert messages.target_spec_from_proto(received) == TARGET_SPEC


def test_opening_of_a_draft_session_has_its_golden_bytes() -> None:
    message = messages.draft_spec_to_proto(DRAFT_SPEC, lease_id=10)
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN_DRAFT_SPEC.hex()
    received = drafter_pb2.OpenDraftSessionRequest.FromString(GOLDEN_DRAFT_SPEC)
    assert messages.draft_spec_from_proto(received) == DRAFT_SPEC


def test_span_of_a_session_has_the_bytes_of_the_standard() -> None:
    header = str(TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331))
    target = messages.target_spec_to_proto(replace(TARGET_SPEC, traceparent=header), 10)
    drafter = messages.draft_spec_to_proto(replace(DRAFT_SPEC, traceparent=header), 10)
    text = TRACEPARENT.encode()
    assert target.SerializeToString(deterministic=True) == GOLDEN_TARGET_SPEC + bytes.fromhex("b201 37") + text
    assert drafter.SerializeToString(deterministic=True) == GOLDEN_DRAFT_SPEC + bytes.fromhex("8a01 37") + text


@pytest.mark.parametrize(
    "header",
    ["x", f"00-{1:032x}-{0:016x}-01", f"01-{1:032x}-{1:016x}-01", f"00-{1:032x}-{1:016x}-01" + 10**6 * "0"],
    ids=["nonsense", "no span", "another version", "endless"],
)
def test_session_of_a_span_that_is_none_is_refused(header: str) -> None:
    target = messages.target_spec_to_proto(replace(TARGET_SPEC, traceparent=header), 10)
    drafter = messages.draft_spec_to_proto(replace(DRAFT_SPEC, traceparent=header), 10)
    with pytest.raises(InvalidRequestError, match=r"^traceparent is not one of W3C Trace Context, version 00$"):
        messages.target_spec_from_proto(target)
    with pytest.raises(InvalidRequestError, match="traceparent"):
        messages.draft_spec_from_proto(drafter)


def test_wish_for_a_block_under_way_has_its_golden_bytes() -> None:
    command = SendDrafted(FENCE.session_id, 1, 300, attempt=2)
    message = messages.send_drafted_to_proto(command)
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN_SEND_DRAFTED.hex()
    wrapped = drafter_pb2.DraftCommand(send_drafted=message).SerializeToString(deterministic=True)
    assert wrapped.hex() == "1a10" + GOLDEN_SEND_DRAFTED.hex(), "3: send_drafted, 16 bytes"
    assert messages.send_drafted_from_proto(drafter_pb2.SendDrafted.FromString(GOLDEN_SEND_DRAFTED)) == command


def test_permit_has_its_golden_bytes() -> None:
    message = messages.permit_to_proto(Permit.make(bytes(range(16)), 300))
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN_PERMIT.hex()
    assert messages.permit_from_proto(session_pb2.DraftPermit.FromString(GOLDEN_PERMIT)).is_made_with(bytes(range(16)))


def test_description_of_a_model_has_its_golden_bytes() -> None:
    message = messages.model_to_proto(MODEL)
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN_MODEL.hex()
    assert messages.model_from_proto(model_pb2.ModelDescription.FromString(GOLDEN_MODEL)) == MODEL


def test_text_that_is_continued_has_its_golden_bytes() -> None:
    """Of a request that is sent again because it was interrupted."""
    came = gateway_pb2.GeneratedChoice(choice=3, token_ids=[7, 300], is_finished=True)
    request = gateway_pb2.GenerateRequest(generated_choices=[came])
    expected = "b20109" + "0803" + "120307ac02" + "1801"  # 22: choice, packed ids, whether it is finished
    assert request.SerializeToString(deterministic=True).hex() == expected


def test_every_number_of_the_statistics_reaches_the_user() -> None:
    """Each field of the message is the one of the same name; durations are named longer on the wire."""
    values = {field.name: 100 + index for index, field in enumerate(fields(Statistics))}
    lists = {"num_accepted_tokens_per_pos": [3, 2], "acceptance_histogram": [4, 1, 2]}
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


@pytest.mark.parametrize("encoding", [session_pb2.DISTRIBUTION_ENCODING_UNSPECIFIED, 6, 99, -1])
def test_encoding_that_is_absent_or_unknown_is_refused(encoding: int) -> None:
    error = refusal(wire_block(encoding=encoding))
    assert error.violation is Violation.ENCODING
    assert "encoding" in str(error)


def test_block_without_distributions_is_refused() -> None:
    assert refusal(session_pb2.DraftBlock(token_ids=[1])).violation is Violation.ENCODING


@pytest.mark.parametrize("kind", [session_pb2.EXTRA_TOKEN_KIND_UNSPECIFIED, 99])
def test_kind_of_extra_token_that_is_absent_or_unknown_is_refused(kind: int) -> None:
    message = messages.verdict_to_proto(VERDICT)
    message.extra_token_kind = kind
    with pytest.raises(InvalidRequestError, match="extra token"):
        messages.verdict_from_proto(sent(message))


def test_token_tree_is_refused() -> None:
    message = wire_block(encoding=session_pb2.DISTRIBUTION_ENCODING_ONE_HOT)
    assert isinstance(received(message)[0].draft, Supports)
    message.parent_indices.append(-1)
    assert "tree" in str(refusal(message))


def test_session_that_takes_no_blocks_has_no_key() -> None:
    message = sent(messages.target_spec_to_proto(replace(TARGET_SPEC, permit_key=b""), 10))
    assert messages.target_spec_from_proto(message).permit_key == b""


@pytest.mark.parametrize("length", [0, 15, 17])
def test_session_with_a_permit_of_another_length_than_16_bytes_is_refused(length: int) -> None:
    message = messages.draft_spec_to_proto(replace(DRAFT_SPEC, permit=Permit(0, bytes(length))), 10)
    with pytest.raises(InvalidRequestError, match="permit"):
        messages.draft_spec_from_proto(sent(message))
    message.ClearField("permit")
    with pytest.raises(InvalidRequestError, match="permit"):
        messages.draft_spec_from_proto(sent(message))


def test_lease_and_hello_have_their_golden_bytes() -> None:
    """The process's id is the same number in both, so that a session's drafter is known by it."""
    lease = session_pb2.Lease(lease_id=1, instance_id=2**64 - 2)
    assert lease.SerializeToString(deterministic=True).hex() == "090100000000000000" + "11feffffffffffffff"
    hello = verifier_pb2.DrafterHello(instance_id=2**64 - 2)
    assert hello.SerializeToString(deterministic=True).hex() == "11feffffffffffffff"


@pytest.mark.parametrize("drafter_id", [None, 0, 2**64 - 1])
def test_refusal_says_which_drafter_is_in_quarantine_or_that_none_is(drafter_id: int | None) -> None:
    event = sent(_event_to_proto(BlockRefused(2**64 - 1, 2, 3, "why", 300, drafter_id)))
    assert event.WhichOneof("event") == "refusal"
    refused = event.refusal
    assert (refused.session_id, refused.epoch, refused.round, refused.message) == (2**64 - 1, 2, 3, "why")
    assert refused.permit_number == 300
    assert refused.HasField("quarantined_drafter_id") == (drafter_id is not None)
    assert refused.quarantined_drafter_id == (drafter_id or 0)


def test_protocol_version_is_that_of_structured_outputs() -> None:
    """A verifier of version 7 would leave their form out of account."""
    assert PROTOCOL_VERSION == 9


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_key_of_another_length_than_16_bytes_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        messages.target_spec_from_proto(verifier_pb2.OpenTargetSessionRequest(verifying_key=bytes(length)))
    if length:
        message = messages.target_spec_to_proto(replace(TARGET_SPEC, permit_key=bytes(length)), 10)
        with pytest.raises(InvalidRequestError, match="16 bytes"):
            messages.target_spec_from_proto(message)
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        messages.draft_spec_from_proto(drafter_pb2.OpenDraftSessionRequest(drafting_key=bytes(length)))
