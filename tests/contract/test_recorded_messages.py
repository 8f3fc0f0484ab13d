"""Every message between services and to users has the bytes that the release before wrote, and is read from them.

`recorded_messages.txt` holds the bytes, recorded from that release: a name and hexadecimal digits in each line. A line
changes only with the protocol's version. What is added gets a line of its own.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from draftwire.client.request_maker import make_request
from draftwire.errors import NoRoomError
from draftwire.method.encoding import DraftDistributions, Supports, encode_dense, encode_sparse
from draftwire.method.quantization import Encoding
from draftwire.method.round_parts import AheadPart, BranchLimits, GuessPart, LogprobsPart, TreePart, WatchedGuess
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
    RoundOutcome,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.method.token_source import TokenSource
from draftwire.models.description import ModelDescription, WarmUpStep
from draftwire.options.heads import feature_messages
from draftwire.options.heads.feature_format import FeatureEncoding
from draftwire.options.heads.features import FeatureRequest, SessionFeatures
from draftwire.options.trees.token_tree import TokenTree
from draftwire.requests.logprobs import LogprobsMode, LogprobsRequest, PromptPart, TokenLogprob
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.requests.session_parameters import SessionParameters
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime import messages
from draftwire.v1 import gateway_pb2, session_pb2, verifier_pb2
from draftwire_gateway.requested_generation import GeneratedChoice, RequestedGeneration
from draftwire_gateway.server import GatewayServicer, _choice_to_proto, _conversation
from draftwire_gateway.server import _event_to_proto as user_event
from draftwire_gateway.session.choices import ChoiceEvent, PromptEcho
from draftwire_gateway.session.committed_text import Delta, Finish, FinishReason
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.speculation.explanation import Explanation, LoadExplanation, RoundParts, WayEstimate
from draftwire_gateway.speculation.pairs import PairName
from draftwire_gateway.text.conversation import ChatTurn, Conversation, Tool, ToolCall
from draftwire_verifier.core import BlockRefused
from draftwire_verifier.server import _event_to_proto as target_event

RECORD = Path(__file__).with_name("recorded_messages.txt")
RECORDED = dict(line.split("\t") for line in RECORD.read_text().splitlines())

VOCAB_SIZE, DRAFTER_ID, LEASE = 320, 2**64 - 5, 2**64 - 3
FENCE = Fence(0x1122334455667788, 2, 300, 5, 0xF1F2F3F4F5F6F7F8)
KEY, OTHER_KEY = bytes(range(16)), bytes(range(16, 32))
PERMIT = Permit(3, KEY)
TREE = TokenTree((-1, -1, 1, 1))
TOKENS = [TokenLogprob(300, -1.0, [(7, -0.5), (300, -1.0)]), TokenLogprob(7, 0.0, [(7, 0.0)])]

SAMPLING = SamplingParams(
    temperature=0.5,
    top_k=40,
    top_p=0.75,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias=((3, -100.0), (300, 1.5)),
    allowed_token_ids=frozenset({9, 3, 300}),
    min_tokens=4,
)
FORMS = {
    "json": StructuredOutput.json('{"type": "object"}'),
    "regex": StructuredOutput.regex("[0-9]+é"),
    "choices": StructuredOutput.choice(["b", "a"]),
    "grammar": StructuredOutput.grammar('start: "a"'),
    "tool calls": StructuredOutput.tool_calls("hermes", {"f": '{"type": "object"}'}, at_least=0, at_most=2),
}
RULES = (
    RuleFacts("typical", is_lossless=False, needs_draft_probs=False, takes_trees=True),
    RuleFacts("coupled", needs_draft_probs=False, is_coupled=True),
    RuleFacts("block"),
)
PARAMETERS = SessionParameters(
    prompt_len=2,
    sampling=SAMPLING,
    rule=RULES[0],
    max_draft_tokens=8,
    stop_token_ids=frozenset({9, 2}),
    choice=3,
    cache_salt="salt",
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    form_memory_bytes=2**40,
    shares_text=True,
)
PLAIN_PARAMETERS = SessionParameters(2, SamplingParams(), RULES[2], 8)
TARGET = TargetSessionSpec(1, 2, 3, [7, 300], PLAIN_PARAMETERS, KEY, 6, 400)
DRAFT = DraftSessionSpec(1, 2, [7, 300], PLAIN_PARAMETERS, KEY, "v:1", VOCAB_SIZE, 400, None)
MODEL = ModelDescription("m", "", "float32", b"\x01\x02", 300, 400, (8, 9))
VERDICT = Verdict(FENCE, [7], 0, 0, TokenSource.PLAIN, 6)
JUDGED = replace(
    VERDICT,
    token_ids=[7, 300, 4],
    num_draft_tokens=4,
    num_accepted_tokens=2,
    extra=TokenSource.RECOVERED,
    plain_rounds_left=0,
    verify_us=1000,
    queue_us=128,
    timings=DraftTimings(10, 200),
    num_near_ties=1,
    num_cached_tokens=144,
)

WRITERS: dict[type, Callable[[Any], Message]] = {
    Fence: messages.fence_to_proto,
    SamplingParams: messages.sampling_to_proto,
    SessionParameters: messages.parameters_to_proto,
    RuleFacts: messages.rule_to_proto,
    Permit: messages.permit_to_proto,
    DrafterIdentity: messages.identity_to_proto,
    Verdict: messages.verdict_to_proto,
    PromptRead: messages.prompt_read_to_proto,
    PlainRun: messages.plain_run_to_proto,
    Calibration: messages.calibration_to_proto,
    SendDrafted: messages.send_drafted_to_proto,
    BlockSent: messages.block_sent_to_proto,
    ModelDescription: messages.model_to_proto,
    SessionFeatures: feature_messages.features_to_proto,
    TargetSessionSpec: lambda spec: messages.target_spec_to_proto(spec, LEASE),
    DraftSessionSpec: lambda spec: messages.draft_spec_to_proto(spec, LEASE),
    DraftBlock: messages.block_to_proto,
}
READERS: dict[type, Callable[[Any], Any]] = {
    Fence: messages.fence_from_proto,
    SamplingParams: messages.sampling_from_proto,
    SessionParameters: messages.parameters_from_proto,
    RuleFacts: messages.rule_from_proto,
    Permit: messages.permit_from_proto,
    DrafterIdentity: messages.identity_from_proto,
    Verdict: messages.verdict_from_proto,
    PromptRead: messages.prompt_read_from_proto,
    PlainRun: messages.plain_run_from_proto,
    Calibration: messages.calibration_from_proto,
    SendDrafted: messages.send_drafted_from_proto,
    BlockSent: messages.block_sent_from_proto,
    ModelDescription: messages.model_from_proto,
    SessionFeatures: feature_messages.features_from_proto,
    TargetSessionSpec: messages.target_spec_from_proto,
    DraftSessionSpec: messages.draft_spec_from_proto,
}

VALUES: dict[str, Any] = {
    "fence": FENCE,
    "permit": PERMIT,
    "identity": DrafterIdentity(DRAFTER_ID, KEY),
    "sampling": SAMPLING,
    "sampling by default": SamplingParams(),
    **{f"sampling with a form, {name}": SamplingParams(structured_output=form) for name, form in FORMS.items()},
    **{f"rule {rule.name}": rule for rule in RULES},
    "parameters": PARAMETERS,
    "parameters by default": PLAIN_PARAMETERS,
    "target session": TARGET,
    "target session with everything": replace(
        TARGET,
        parameters=PARAMETERS,
        permit_key=OTHER_KEY,
        logprobs=LogprobsRequest(0, 20, LogprobsMode.PROCESSED),
        reports_draft_logprobs=True,
        watched=LocalDraft("suffix", 5, "ngram"),
        max_held_blocks=4,
        max_tree_nodes=12,
    ),
    "target session with raw log-probabilities": replace(TARGET, logprobs=LogprobsRequest(3)),
    "draft session": DRAFT,
    "draft session with everything": replace(
        DRAFT, parameters=PARAMETERS, permit=PERMIT, ahead=BranchLimits(6, 4), max_tree_nodes=12
    ),
    "model": MODEL,
    "model with everything": replace(
        MODEL,
        revision="r",
        weights_fingerprint=b"\x03\x04",
        protocol_version=11,
        oldest_protocol_version=9,
        capabilities=frozenset({"held_blocks", "features"}),
        rules=RULES,
        local_strategies=("suffix", "b"),
        max_tree_nodes=12,
    ),
    "model that was warmed up": replace(MODEL, warm_up_steps=(WarmUpStep(2, 900), WarmUpStep(64, 70_000))),
    "verdict, plain": VERDICT,
    "verdict": JUDGED,
    "verdict, bonus": replace(JUDGED, extra=TokenSource.BONUS),
    "verdict with log-probabilities": replace(VERDICT, token_ids=[300, 7], logprobs=LogprobsPart(TOKENS)),
    "verdict with own log-probabilities": replace(VERDICT, logprobs=LogprobsPart([TokenLogprob(7, -math.inf)])),
    "verdict with draft log-probabilities": replace(JUDGED, logprobs=LogprobsPart(draft=[-1.0, 0.0, -math.inf])),
    "verdict of a guess": replace(JUDGED, guess=GuessPart("suffix")),
    "verdict with a watched guess": replace(VERDICT, guess=GuessPart(watched=WatchedGuess(True, 3))),
    "verdict with nothing guessed": replace(VERDICT, guess=GuessPart(watched=WatchedGuess(False))),
    "verdict of a block ahead": replace(
        JUDGED, ahead=AheadPart(next_is_held=True, is_ahead=True, num_wasted_draft_tokens=300, held_bytes=2**33)
    ),
    "verdict of a block that came late": replace(JUDGED, ahead=AheadPart(is_ahead=True)),
    "verdict of a tree": replace(JUDGED, tree=TreePart(3)),
    "verdict of a block that ended unsure": replace(JUDGED, confidence_buckets=bytes([7, 0, 5, 1])),
    "verdict under a form": replace(JUDGED, mask_us=300),
    "prompt that was read": PromptRead(FENCE.session_id, 1, PromptPart(300, TOKENS)),
    "plain run": PlainRun(FENCE, 300),
    "plain run with drafts": PlainRun(FENCE, 300, LocalDraft("suffix", 4, "b")),
    "calibration": Calibration(FENCE, 3, [7, 300], 4),
    "calibration with a permit": Calibration(FENCE, 3, [7, 300], 4, PERMIT),
    "calibration with rounds ahead": Calibration(FENCE, 3, [], 4, max_rounds_ahead=2),
    "calibration with a stop": Calibration(FENCE, 3, [7, 300], 4, stop_below=0.75),
    "calibration that asks how sure it is": Calibration(FENCE, 3, [7, 300], 4, stop_below=0.0),
    "calibration with a tree": Calibration(FENCE, 3, [7], 4, tree=DraftTree(5)),
    "calibration with a shape": Calibration(FENCE, 3, [7], 4, tree=DraftTree(4, TokenTree((-1, -1, 0, 0)))),
    "flush": SendDrafted(FENCE.session_id, 2, 300),
    "flush reply": BlockSent(FENCE.session_id, 2, 300),
    "features": SessionFeatures(FENCE.session_id, 2, 5, 2, b"\x01\x02\x03\x04", b"\x05\x06"),
}
"""Messages that are read back, with what is read."""

SUPPORTS = Supports(
    np.array([[7, 300, 5], [300, 7, 9]]), np.array([[49_152, 16_284, 100], [2**15, 2**15, 0]]), VOCAB_SIZE
)
ROWS = np.array([[0.25, 0.75], [1.0, 0.0]])
BLOCK = DraftBlock(FENCE, [7, 300], encode_sparse(SUPPORTS, [2])[0])
BLOCKS: dict[str, DraftBlock] = {
    "block": BLOCK,
    "block with timings and permit": replace(BLOCK, timings=DraftTimings(10, 200), permit=PERMIT),
    "block, dense": replace(BLOCK, token_ids=[1, 0], distributions=encode_dense(Encoding.DENSE_FLOAT32, ROWS)),
    "block, dense halves": replace(BLOCK, token_ids=[1, 0], distributions=encode_dense(Encoding.DENSE_FLOAT16, ROWS)),
    "block of certain tokens": replace(BLOCK, distributions=DraftDistributions(Encoding.ONE_HOT, 301)),
    "block without distributions": replace(BLOCK, distributions=DraftDistributions(Encoding.NONE, 301)),
    "block ahead": replace(BLOCK, is_ahead=True),
    "block that ended unsure": replace(BLOCK, confidence_buckets=bytes([7, 0, 2])),
    "block that ended before its first token": replace(
        BLOCK, token_ids=[], distributions=DraftDistributions(Encoding.ONE_HOT, 301), confidence_buckets=b"\1"
    ),
    "block that is a tree": replace(BLOCK, token_ids=[300, 7, 300, 7], parents=TREE.parents),
    "block that is a tree of ids": DraftBlock(
        FENCE, [9, 9, 7, 5], DraftDistributions(Encoding.NONE, 301), parents=TREE.parents
    ),
}


def statistics() -> Statistics:
    """Returns statistics in which all numbers differ."""
    return Statistics(
        num_prompt_tokens=1,
        num_cached_prompt_tokens=2,
        num_generated_tokens=3,
        num_emitted_tokens=4,
        num_near_ties=5,
        num_rounds=6,
        num_drafts=7,
        num_draft_tokens=800,
        num_draft_positions=16,
        num_trees=10,
        num_accepted_tokens=11,
        num_accepted_tokens_per_pos=[3, 2, 300],
        acceptance_histogram=[4, 0, 2],
        draft_length_histogram=[1, 0, 7],
        time_to_first_token_us=2**40 + 1,
        duration_us=2**40 + 2,
        calibration_us=2**40 + 3,
        draft_us=2**40 + 4,
        verify_us=2**40 + 5,
        queue_us=2**40 + 6,
        num_ahead_hits=12,
        num_ahead_late=13,
        num_ahead_misses=14,
        num_ahead_wasted_tokens=2**40 + 7,
        max_held_bytes=2**40 + 8,
        num_drafters_lost=15,
        num_verifiers_lost=17,
    )


GENERATION = Generation([1], SamplingParams(), 4, (), frozenset(), 5, 4, RULES[0], choice=1)
DELTA = Delta([7, 300], "ab")
DETAILS = replace(
    DELTA,
    logprobs=TOKENS,
    sources=[TokenSource.ACCEPTED, TokenSource.RECOVERED],
    num_draft_tokens=4,
    draft_logprobs=[-1.0, -math.inf],
    text_lengths=[2, 0],
    num_draft_positions=3,
)
EVENTS: dict[str, Any] = {
    "delta": DELTA,
    "delta with details": DETAILS,
    "delta, plain": replace(DELTA, sources=[TokenSource.PLAIN, TokenSource.BONUS]),
    "log-probabilities of a prompt": PromptPart(300, TOKENS),
    "echo": PromptEcho([7, 300], "ab"),
    "finish": Finish(FinishReason.LENGTH, statistics(), "lost"),
    "finish without statistics": Finish(FinishReason.STOP, Statistics(), ""),
}
PAIR = PairName("v:1", "small", "suffix")
EXPLAINED = Explanation(
    3,
    (
        LoadExplanation(
            1,
            2,
            Arm(DraftSource.VERIFIER, 4),
            (WayEstimate(Arm(DraftSource.DRAFTER, 3), 1.5, RoundParts(0.125, 0.0625, 0.0625), 0.75, 6),),
        ),
        LoadExplanation(3, 4, PLAIN, ()),
    ),
)
REQUESTS = {
    "request": make_request([7, 300], {}),
    "request with everything": make_request(
        [[7, 300], [4]],
        {
            **{name: getattr(SAMPLING, name) for name in ("temperature", "top_k", "top_p", "min_p", "min_tokens")},
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {3: -100.0, 300: 1.5},
            "allowed_token_ids": [3, 9, 300],
            "num_choices": 2,
            "max_tokens": 0,
            "stop": ["a", "b"],
            "stop_token_ids": [9, 2],
            "ignore_eos": True,
            "seed": 2**64 - 1,
            "num_speculative_tokens": 0,
            "num_draft_nodes": 12,
            "drafter": ["small", "suffix"],
            "rejection_sample_method": "block",
            "logprobs": 0,
            "prompt_logprobs": 20,
            "logprobs_mode": "raw",
            "echo": True,
            "token_details": True,
            "cache_salt": "salt",
        },
    ),
    "request with a form": make_request([7], {"structured_output": FORMS["tool calls"]}),
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REQUESTS["request with a stop"] = make_request([7, 300], {"stop_below": 0.5})
REQUESTS["request of a chat"] = make_request(
    [
        {"role": "user", "content": "a", "name": "b"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ],
    {
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "g"}},
        ],
        "template_arguments": {"e": 1},
        "continue_final_message": True,
    },
)
CONVERSATION = Conversation(
    turns=(
        ChatTurn("user", "a", name="b"),
        ChatTurn("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),)),
        ChatTurn("tool", "c", tool_call_id="1"),
    ),
    tools=(Tool("f", "d", '{"type": "object"}'), Tool("g")),
    template_arguments='{"e": 1}',
    continues_last=True,
)
REQUESTED = {
    "request": RequestedGeneration([[7, 300]], SamplingParams(), "user"),
    "request with everything": RequestedGeneration(
        [[7, 300], [4]],
        SAMPLING,
        "user",
        num_choices=2,
        max_tokens=0,
        stop=("a", "b"),
        stop_token_ids=(9, 2),
        ignore_eos=True,
        seed=2**64 - 1,
        num_speculative_tokens=0,
        num_draft_nodes=12,
        drafter=("small", "suffix"),
        rule="block",
        cache_salt="salt",
        generated_choices=(GeneratedChoice(3, (7, 300), True),),
        logprobs=0,
        prompt_logprobs=20,
        logprobs_mode="raw",
        echo=True,
        token_details=True,
    ),
    "request with a stop": RequestedGeneration([[7, 300]], SamplingParams(), "user", stop_below=0.5),
    "request with a form": RequestedGeneration([[7]], SamplingParams(structured_output=FORMS["tool calls"]), "user"),
}
REQUESTS["request with everything"].generated_choices.append(
    gateway_pb2.GeneratedChoice(choice=3, token_ids=[7, 300], is_finished=True)
)
OUTCOMES = [RoundOutcome(FENCE, [7, 300]), RoundOutcome(replace(FENCE, round=7), [4])]
WANTED_FEATURES = [FeatureRequest(2**64 - 2, 2, PERMIT, 9), FeatureRequest(1, 0, PERMIT, 9, first_position=0)]
WRITTEN: dict[str, Message] = {
    **{name: messages.block_to_proto(block) for name, block in BLOCKS.items()},
    **{name: user_event(ChoiceEvent(GENERATION, event)) for name, event in EVENTS.items()},
    **REQUESTS,
    "outcomes": verifier_pb2.RoundOutcomes(outcomes=map(messages.outcome_to_proto, OUTCOMES)),
    "feature requests": verifier_pb2.FeatureRequests(
        requests=map(feature_messages.feature_request_to_proto, WANTED_FEATURES)
    ),
    **{
        f"feature source, {encoding.value}": feature_messages.feature_source_to_proto(b"\x01\x02", encoding)
        for encoding in FeatureEncoding
    },
    "failure": messages.failure_to_proto(2**64 - 1, 3, NoRoomError("full")),
    "event, verdict": target_event(JUDGED),
    "event, prompt": target_event(PromptRead(2**64 - 2, 1, PromptPart(1, TOKENS))),
    "event, refusal": target_event(BlockRefused(2**64 - 1, 2, 3, "why", 300, DRAFTER_ID)),
    "event, refusal of nobody": target_event(BlockRefused(2**64 - 1, 2, 3, "why", 300, None)),
    "what a pair drafts": _choice_to_proto(PAIR, EXPLAINED),
}
"""Messages whose readers take more than the message, or are the users' stubs."""


def data_of(message: Message) -> str:
    """Returns the bytes of a message as the record has them."""
    return message.SerializeToString(deterministic=True).hex()


def read(kind: type[Message], name: str) -> Any:
    """Returns a message of the record."""
    return kind.FromString(bytes.fromhex(RECORDED[name]))


def test_record_has_each_message_once() -> None:
    assert sorted(RECORDED) == sorted([*VALUES, *WRITTEN])


@pytest.mark.parametrize("name", VALUES)
def test_value_is_written_as_recorded_and_read_from_it(name: str) -> None:
    value = VALUES[name]
    message = WRITERS[type(value)](value)
    assert data_of(message) == RECORDED[name]
    assert READERS[type(value)](read(type(message), name)) == value


@pytest.mark.parametrize("name", WRITTEN)
def test_message_is_written_as_recorded(name: str) -> None:
    assert data_of(WRITTEN[name]) == RECORDED[name]


@pytest.mark.parametrize("name", BLOCKS)
def test_block_is_read_from_the_record(name: str) -> None:
    block = BLOCKS[name]
    (got,) = messages.blocks_from_proto([read(session_pb2.DraftBlock, name)], DRAFTER_ID, VOCAB_SIZE, 8, 12)
    assert (got.fence, got.token_ids, got.timings, got.permit) == (
        *(block.fence, block.token_ids),
        *(block.timings, block.permit),
    )
    assert (got.tree.parents if got.tree else ()) == block.parents
    assert (got.is_ahead, got.drafter_id) == (block.is_ahead, DRAFTER_ID)
    assert got.confidence_buckets == block.confidence_buckets
    assert got.has_distributions == (block.distributions.encoding is not Encoding.NONE)
    if block.distributions == BLOCK.distributions:
        assert isinstance(got.draft, Supports)
        assert got.draft.weights.tolist() == SUPPORTS.weights.tolist()
        assert got.draft.token_ids[0].tolist() == SUPPORTS.token_ids[0].tolist()


@pytest.mark.parametrize("name", REQUESTED)
def test_request_is_read_from_the_record(name: str) -> None:
    servicer = GatewayServicer(None, None, None)  # type: ignore[arg-type]
    request = read(gateway_pb2.GenerateRequest, name)
    assert asyncio.run(servicer._requested(request, "user")) == REQUESTED[name]


def test_conversation_is_read_from_the_record() -> None:
    assert _conversation(read(gateway_pb2.GenerateRequest, "request of a chat").chat) == CONVERSATION


def test_lists_of_a_drafters_stream_are_read_from_the_record() -> None:
    outcomes = read(verifier_pb2.RoundOutcomes, "outcomes").outcomes
    assert list(map(messages.outcome_from_proto, outcomes)) == OUTCOMES
    requests = read(verifier_pb2.FeatureRequests, "feature requests").requests
    assert list(map(feature_messages.feature_request_from_proto, requests)) == WANTED_FEATURES
    for encoding in FeatureEncoding:
        source = read(verifier_pb2.FeatureSource, f"feature source, {encoding.value}")
        assert (source.fingerprint, feature_messages.feature_encoding_from_proto(source)) == (b"\x01\x02", encoding)
