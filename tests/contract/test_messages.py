"""What services say to each other survives the wire, and its bytes do not change by accident."""

import math
from dataclasses import fields

import pytest
import torch
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire.distributions import DraftDistributions, Encoding
from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.models.description import ModelDescription
from draftwire.rounds import (
    Calibration,
    DraftBlock,
    DraftSessionSpec,
    DraftTimings,
    ExtraToken,
    Fence,
    PlainRun,
    TargetSessionSpec,
    Verdict,
)
from draftwire.sampling import MAX_ALLOWED_TOKENS, MAX_BIASED_TOKENS, PARAMETERS, SamplingParams
from draftwire.services.gateway.server import _statistics_to_proto
from draftwire.services.gateway.statistics import Statistics
from draftwire.services.rpc import messages
from draftwire.services.rpc.status import error_of_number
from draftwire.v1 import drafter_pb2, session_pb2, verifier_pb2

UNHURRIED = settings(deadline=None)  # the machine may be busy
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
IDS = st.lists(UINT32, max_size=12)
KEYS = st.binary(min_size=16, max_size=16)
TEXT = st.text(max_size=20)

FENCES = st.builds(Fence, session_id=UINT64, epoch=UINT32, round=UINT32, prefix_len=UINT32, prefix_hash=UINT64)
TIMINGS = st.builds(DraftTimings, calibration_us=UINT32, draft_us=UINT32)
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
ROWS = st.tuples(st.integers(0, 4), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(st.floats(0.0, 1.0, width=32), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    ).map(lambda rows: torch.tensor(rows, dtype=torch.float32).reshape(shape))
)
DENSE = ROWS.map(DraftDistributions.from_rows)
ONE_HOT = UINT32.map(DraftDistributions.one_hot)
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
    cache_salt=TEXT,
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
    distributions=DraftDistributions.from_rows(torch.tensor([[0.25, 0.75], [1.0, 0.0]])),
    attempt=2,
    timings=DraftTimings(calibration_us=10, draft_us=200),
)
GOLDEN_BLOCK = (
    bytes.fromhex("0a 19")  # 1: fence, 25 bytes
    + GOLDEN_FENCE
    + bytes.fromhex(
        "10 02"  # 2: attempt
        "1a 03 07ac02"  # 3: token_ids, packed
        "2a 16"  # 5: distributions, 22 bytes
        "08 01"  # 1: encoding, dense float32
        "10 02"  # 2: vocab_size
        "1a 10 0000803e 0000403f 0000803f 00000000"  # 3: data, float32 little-endian, row-major
        "30 0a"  # 6: calibration_duration_us
        "38 c801"  # 7: draft_duration_us
    )
)
VERDICT = Verdict(
    fence=FENCE,
    token_ids=[7, 300, 4],
    num_draft_tokens=4,
    num_accepted_tokens=2,
    extra=ExtraToken.RECOVERED,
    plain_rounds_left=6,
    verify_us=1,
    queue_us=128,
    timings=DraftTimings(calibration_us=10, draft_us=200),
    num_cached_tokens=144,
)
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
)


def sent(message: Message) -> Message:
    """Returns what a peer receives."""
    return type(message).FromString(message.SerializeToString())


def wire_block(**changes: object) -> session_pb2.DraftBlock:
    return session_pb2.DraftBlock(token_ids=[1], distributions=session_pb2.DraftDistributions(vocab_size=4, **changes))


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


def test_absent_sampling_parameters_get_their_defaults() -> None:
    assert messages.sampling_from_proto(session_pb2.SamplingParameters()) == SamplingParams()


def test_sampling_parameters_are_sent_even_where_they_are_zero() -> None:
    message = sent(messages.sampling_to_proto(SamplingParams(temperature=0.0, top_k=0, top_p=1.0)))
    names = [name for name in PARAMETERS if name not in ("logit_bias", "allowed_token_ids")]
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


@given(FENCES, IDS, st.one_of(DENSE, ONE_HOT), UINT32, TIMINGS)
@UNHURRIED
def test_draft_block_survives_the_wire_to_the_bit(
    fence: Fence, ids: list[int], distributions: DraftDistributions, attempt: int, timings: DraftTimings
) -> None:
    block = DraftBlock(fence, ids, distributions, attempt, timings)
    assert messages.block_from_proto(sent(messages.block_to_proto(block))) == block


@pytest.mark.parametrize("encoding", Encoding)
def test_every_encoding_has_a_number_on_the_wire(encoding: Encoding) -> None:
    block = DraftBlock(FENCE, [1], DraftDistributions(encoding, 4, b""))
    assert messages.block_from_proto(sent(messages.block_to_proto(block))).distributions.encoding is encoding


@given(
    st.builds(
        Verdict,
        fence=FENCES,
        token_ids=IDS,
        num_draft_tokens=UINT32,
        num_accepted_tokens=UINT32,
        extra=st.sampled_from(ExtraToken),
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


@pytest.mark.parametrize("extra", ExtraToken)
def test_every_kind_of_extra_token_has_a_number_on_the_wire(extra: ExtraToken) -> None:
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
    assert messages.block_from_proto(session_pb2.DraftBlock.FromString(GOLDEN_BLOCK)) == BLOCK


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


def test_every_number_of_the_statistics_reaches_the_user() -> None:
    """Each field of the message is the one of the same name; durations are named longer on the wire."""
    values = {field.name: 100 + index for index, field in enumerate(fields(Statistics))}
    statistics = Statistics(**(values | {"num_accepted_tokens_per_pos": [3, 2]}))
    message = sent(_statistics_to_proto(statistics))
    shorter = {f"{name}_duration_us": f"{name}_us" for name in ("calibration", "draft", "verify", "queue")}
    assert {shorter.get(field.name, field.name) for field in message.DESCRIPTOR.fields} == set(values)
    for field in message.DESCRIPTOR.fields:
        found = getattr(message, field.name)
        assert (found if isinstance(found, int) else list(found)) == getattr(
            statistics, shorter.get(field.name, field.name)
        )


@pytest.mark.parametrize(
    "encoding",
    [
        session_pb2.DISTRIBUTION_ENCODING_UNSPECIFIED,
        session_pb2.DISTRIBUTION_ENCODING_SPARSE_UINT16,
        99,
    ],
)
def test_encoding_that_is_absent_unsupported_or_unknown_is_refused(encoding: int) -> None:
    with pytest.raises(InvalidRequestError, match="encoding"):
        messages.block_from_proto(sent(wire_block(encoding=encoding)))


def test_block_without_distributions_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="encoding"):
        messages.block_from_proto(session_pb2.DraftBlock(token_ids=[1]))


@pytest.mark.parametrize("kind", [session_pb2.EXTRA_TOKEN_KIND_UNSPECIFIED, 99])
def test_kind_of_extra_token_that_is_absent_or_unknown_is_refused(kind: int) -> None:
    message = messages.verdict_to_proto(VERDICT)
    message.extra_token_kind = kind
    with pytest.raises(InvalidRequestError, match="extra token"):
        messages.verdict_from_proto(sent(message))


def test_token_tree_is_refused() -> None:
    message = wire_block(encoding=session_pb2.DISTRIBUTION_ENCODING_ONE_HOT)
    messages.block_from_proto(sent(message))
    message.parent_indices.append(-1)
    with pytest.raises(InvalidRequestError, match="tree"):
        messages.block_from_proto(sent(message))


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_key_of_another_length_than_16_bytes_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        messages.target_spec_from_proto(verifier_pb2.OpenTargetSessionRequest(verifying_key=bytes(length)))
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        messages.draft_spec_from_proto(drafter_pb2.OpenDraftSessionRequest(drafting_key=bytes(length)))
