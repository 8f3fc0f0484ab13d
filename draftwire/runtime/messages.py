"""Encoding and decoding of messages between services: protobuf to and from dataclasses. Enum value 0 is refused.

`codec` converts what has the same name and type on both sides; here is what has not, and what is checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from draftwire.errors import BlockViolationError, InvalidRequestError, Violation
from draftwire.method.ahead_limits import MAX_BRANCHES, MAX_ROUNDS_AHEAD
from draftwire.method.confidence import check_buckets, check_stop
from draftwire.method.encoding import Claim, DraftDistributions, Supports, decode
from draftwire.method.keys import KEY_BYTES
from draftwire.method.quantization import Encoding
from draftwire.method.round_parts import LogprobsPart, WatchedGuess
from draftwire.method.rounds import (
    BlockSent,
    Calibration,
    DraftBlock,
    DrafterIdentity,
    DraftSessionSpec,
    DraftTimings,
    Fence,
    LocalDraft,
    Permit,
    PlainRun,
    PromptRead,
    ReceivedBlock,
    RoundOutcome,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.method.token_source import TokenSource
from draftwire.method.tree_limits import MAX_TREE_NODES
from draftwire.models.description import ModelDescription, WarmUpStep, check_protocol
from draftwire.requests.logprobs import LogprobsMode, TokenLogprob
from draftwire.requests.packed_logprobs import PackedTop, pack_top, unpack_top
from draftwire.requests.parameters import MAX_ALLOWED_TOKENS, MAX_BIASED_TOKENS, SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.requests.session_parameters import SessionParameters
from draftwire.runtime.codec import Codec, Conversion, FieldCheck, MessagePart, converters, enumeration, members_of
from draftwire.runtime.form_messages import form_from_proto, form_to_proto
from draftwire.runtime.status import status_of
from draftwire.runtime.traceparent import parse_own_traceparent
from draftwire.v1 import drafter_pb2, model_pb2, session_pb2, verifier_pb2

MAX_SAID = 64
"""Most rules, and most capabilities, in a peer's model description."""
MAX_BLOCKS = 256
"""Most draft blocks in one message. A verifier with more sessions takes as many."""
MAX_NAME_LENGTH = 256
"""Most characters of a model's name: names are stored, logged, and label every series of the audit's metrics."""

TREES = "draftwire.options.trees.tree_messages"
"""Converts token trees; loaded with the first of them."""

_ENCODINGS = members_of(Encoding, session_pb2.DistributionEncoding)


def _trees() -> Any:
    return import_module(TREES)


def _key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise InvalidRequestError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def _permit(permit: Permit | None) -> Permit | None:
    if permit is not None and len(permit.token) != KEY_BYTES:
        raise InvalidRequestError(f"a permit's token has {KEY_BYTES} bytes, not {len(permit.token)}")
    return permit


def _traceparent(header: str) -> str:
    if header and parse_own_traceparent(header) is None:
        raise InvalidRequestError("traceparent is not one of W3C Trace Context, version 00")
    return header


def _at_most(**bounds: int) -> dict[str, FieldCheck]:
    """Returns the checks of numbers by their names."""

    def checked(name: str, most: int, value: int) -> int:
        if value > most:
            raise InvalidRequestError(f"{name} is at most {most}")
        return value

    return {name: partial(checked, name, most) for name, most in bounds.items()}


fence_to_proto, fence_from_proto = converters(Fence, session_pb2.Fence)
permit_to_proto, permit_from_proto = converters(Permit, session_pb2.DraftPermit)
"""The token of a permit is not verified, that of an identity neither."""
identity_to_proto, identity_from_proto = converters(
    DrafterIdentity, verifier_pb2.DrafterIdentity, checks={"token": _key}
)
send_drafted_to_proto, send_drafted_from_proto = converters(SendDrafted, drafter_pb2.SendDrafted)
block_sent_to_proto, block_sent_from_proto = converters(BlockSent, drafter_pb2.BlockSent)

# Parameters and sessions


def _few(name: str, most: int, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> Conversion:
    """Returns the conversion of a collection whose length is checked before anything is allocated."""

    def checked(values: Any) -> Any:
        if len(values) > most:
            raise InvalidRequestError(f"{name} takes at most {most} token ids")
        return decode(values)

    return Conversion(encode, checked)


sampling_to_proto, sampling_from_proto = converters(
    SamplingParams,
    session_pb2.SamplingParameters,
    logit_bias=_few("logit_bias", MAX_BIASED_TOKENS, dict, lambda bias: tuple(sorted(bias.items()))),
    allowed_token_ids=_few(
        "allowed_token_ids", MAX_ALLOWED_TOKENS, lambda ids: sorted(ids or ()), lambda ids: frozenset(ids) or None
    ),
    structured_output=Conversion(form_to_proto, form_from_proto, is_optional=True),
)
rule_to_proto, rule_from_proto = converters(RuleFacts, session_pb2.VerificationRule)
parameters_to_proto, parameters_from_proto = converters(
    SessionParameters, session_pb2.SessionParameters, checks={"traceparent": _traceparent}
)
converters(LocalDraft, verifier_pb2.LocalDraft)
_TARGET_SPEC = Codec(
    TargetSessionSpec,
    verifier_pb2.OpenTargetSessionRequest,
    {"mode": "logprobs_mode", "reports_draft_logprobs": "draft_logprobs"},
    {
        "verifying_key": _key,
        "permit_key": lambda key: key and _key(key),
        **_at_most(max_held_blocks=MAX_BRANCHES, max_tree_nodes=MAX_TREE_NODES),
    },
    mode=Conversion(lambda mode: mode.value, lambda name: LogprobsMode.named(name) if name else LogprobsMode.RAW),
)
_DRAFT_SPEC = Codec(
    DraftSessionSpec,
    drafter_pb2.OpenDraftSessionRequest,
    checks={
        "drafting_key": _key,
        "permit": _permit,
        "ahead": lambda limits: limits if limits and limits.max_branches else None,
        **_at_most(max_branches=MAX_BRANCHES, max_held_blocks=MAX_BRANCHES, max_tree_nodes=MAX_TREE_NODES),
    },
)
target_spec_from_proto, draft_spec_from_proto = _TARGET_SPEC.decode, _DRAFT_SPEC.decode


def target_spec_to_proto(spec: TargetSessionSpec, lease_id: int) -> verifier_pb2.OpenTargetSessionRequest:
    """Encodes the request to open a session on a verifier."""
    return verifier_pb2.OpenTargetSessionRequest(lease_id=lease_id, **_TARGET_SPEC.fields_of(spec))


def draft_spec_to_proto(spec: DraftSessionSpec, lease_id: int) -> drafter_pb2.OpenDraftSessionRequest:
    """Encodes the request to open a session on a drafter."""
    return drafter_pb2.OpenDraftSessionRequest(lease_id=lease_id, **_DRAFT_SPEC.fields_of(spec))


# Blocks

_, _distributions_from_proto = converters(
    DraftDistributions, session_pb2.DraftDistributions, encoding=enumeration(_ENCODINGS, "unknown encoding {}")
)
block_to_proto = Codec(DraftBlock, session_pb2.DraftBlock, {"parents": "parent_indices"}).encode


def blocks_from_proto(
    messages: Sequence[session_pb2.DraftBlock],
    drafter_id: int,
    vocab_size: int,
    max_draft_tokens: int,
    max_tree_nodes: int = 0,
) -> list[ReceivedBlock]:
    """Decodes and checks the draft blocks of one message together. A violation is stored in `draft` of its block.

    Blocks of more than `max_draft_tokens` and token trees of more than `max_tree_nodes` are refused without decoding
    them.
    """
    read = [_claim_from_proto(message, max_draft_tokens, max_tree_nodes) for message in messages]
    decoded = iter(decode([claim for claim in read if isinstance(claim, Claim)], vocab_size))
    nothing = Supports(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64), vocab_size)
    return [
        ReceivedBlock(
            fence=fence_from_proto(message.fence),
            token_ids=claim.token_ids if isinstance(claim, Claim) else [],
            draft=next(decoded) if isinstance(claim, Claim) else claim or nothing,
            has_distributions=message.distributions.encoding != session_pb2.DISTRIBUTION_ENCODING_NONE,
            drafter_id=drafter_id,
            timings=DraftTimings(
                message.calibration_duration_us, message.draft_duration_us, message.num_drafted_sessions
            ),
            permit=permit_from_proto(message.permit) if message.HasField("permit") else None,
            is_ahead=message.is_ahead,
            tree=claim.tree if isinstance(claim, Claim) else None,
            confidence_buckets=message.confidence_buckets,
        )
        for message, claim in zip(messages, read, strict=True)
    ]


def _claim_from_proto(
    message: session_pb2.DraftBlock, max_draft_tokens: int, max_tree_nodes: int
) -> Claim | BlockViolationError | None:
    """Returns what a block claims; None if it ended before its first token, and declares nothing."""
    stated = message.distributions
    if stated.encoding not in _ENCODINGS:
        return BlockViolationError(Violation.ENCODING, f"distribution encoding {stated.encoding} is not accepted")
    is_tree = len(message.parent_indices) > 0
    if is_tree and not max_tree_nodes:
        return BlockViolationError(Violation.ENCODING, "token trees are not accepted")
    what, most = ("token tree", max_tree_nodes) if is_tree else ("block", max_draft_tokens)
    if len(message.token_ids) > most:
        return BlockViolationError(
            Violation.LENGTH, f"{what} of {len(message.token_ids)} draft tokens, the limit is {most}"
        )
    num_sizes = max(len(stated.support_sizes), len(stated.wide_sizes))
    if num_sizes > most:  # in memory a large one takes 18 times what it takes on the wire
        return BlockViolationError(Violation.ENCODING, f"{num_sizes} support sizes, the limit is {most}")
    if message.confidence_buckets:
        try:
            check_buckets(message.confidence_buckets, len(message.token_ids))
        except InvalidRequestError as error:
            return BlockViolationError(Violation.ENCODING, str(error))
        if is_tree:
            return BlockViolationError(Violation.ENCODING, "confidence of a token tree")
        if not message.token_ids and not (stated.data or num_sizes):
            return None
    try:
        tree = _trees().TokenTree.of(message.parent_indices, len(message.token_ids)) if is_tree else None
    except BlockViolationError as violation:
        return violation
    return Claim(list(message.token_ids), _distributions_from_proto(stated), tree)


# Verdicts


_packed_to_proto, _packed_from_proto = converters(PackedTop, session_pb2.TopLogprobs)


def top_to_proto(tokens: Sequence[TokenLogprob]) -> session_pb2.TopLogprobs | None:
    """Encodes the likeliest tokens; None if there are none."""
    packed = pack_top(tokens)
    return None if packed is None else _packed_to_proto(packed)


def tokens_from_proto(message: session_pb2.Verdict | verifier_pb2.PromptRead) -> list[TokenLogprob]:
    """Decodes the log-probabilities of a message's tokens; empty if it has none.

    Raises:
        InvalidRequestError: the numbers do not fit the tokens.
    """
    packed = _packed_from_proto(message.top_logprobs) if message.HasField("top_logprobs") else None
    return unpack_top(message.token_ids, message.logprobs, packed)


def _round_logprobs_from_proto(message: session_pb2.Verdict) -> LogprobsPart | None:
    if message.draft_logprobs and len(message.draft_logprobs) != len(message.token_ids):
        raise InvalidRequestError(
            f"{len(message.draft_logprobs)} log-probabilities of drafters, of {len(message.token_ids)} tokens"
        )
    target, draft = tokens_from_proto(message), list(message.draft_logprobs)
    if any(value > 0.0 for value in draft):
        raise InvalidRequestError("a log-probability of a drafter is a number of at most 0, or NaN")
    return LogprobsPart(target, draft) if target or draft else None


def _logprobs_fields(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"logprobs": [token.logprob for token in tokens], "top_logprobs": top_to_proto(tokens)}


def _round_logprobs_fields(logprobs: LogprobsPart | None) -> dict[str, Any]:
    return {} if logprobs is None else {**_logprobs_fields(logprobs.target), "draft_logprobs": logprobs.draft}


def _prompt_fields(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"token_ids": [token.token_id for token in tokens], **_logprobs_fields(tokens)}


prompt_read_to_proto, prompt_read_from_proto = converters(
    PromptRead, verifier_pb2.PromptRead, tokens=MessagePart(_prompt_fields, tokens_from_proto)
)


def _buckets_from_proto(message: session_pb2.Verdict) -> bytes:
    return check_buckets(message.confidence_buckets, message.num_draft_tokens)


converters(WatchedGuess, session_pb2.WatchedGuess)
verdict_to_proto, verdict_from_proto = converters(
    Verdict,
    session_pb2.Verdict,
    {"extra": "extra_token_kind"},
    extra=enumeration(members_of(TokenSource, session_pb2.ExtraTokenKind), "unknown kind of extra token {}"),
    logprobs=MessagePart(_round_logprobs_fields, _round_logprobs_from_proto),
    confidence_buckets=MessagePart(lambda buckets: {"confidence_buckets": buckets}, _buckets_from_proto),
)

# Commands of the gateway

plain_run_to_proto, plain_run_from_proto = converters(PlainRun, verifier_pb2.PlainRun)


calibration_to_proto, calibration_from_proto = converters(
    Calibration,
    drafter_pb2.Calibration,
    checks={"permit": _permit, "stop_below": check_stop, **_at_most(max_rounds_ahead=MAX_ROUNDS_AHEAD)},
    tree=Conversion(
        lambda tree: _trees().fields_of(tree), lambda message: _trees().tree_from_proto(message), is_optional=True
    ),
)

outcome_to_proto, outcome_from_proto = converters(RoundOutcome, verifier_pb2.RoundOutcome)

# Models and failures

converters(WarmUpStep, model_pb2.WarmUpStep)
model_to_proto, _model_from_proto = converters(ModelDescription, model_pb2.ModelDescription)


def model_from_proto(message: model_pb2.ModelDescription) -> ModelDescription:
    """Decodes a model's description.

    Raises:
        ModelMismatchError: no protocol version is supported by both peers.
        InvalidRequestError: a list or a name is too long, or the name of a rule is not valid.
    """
    check_protocol(message.name, message.oldest_protocol_version or message.protocol_version, message.protocol_version)
    for name in ("rules", "capabilities", "local_strategies", "warm_up_steps"):
        if len(getattr(message, name)) > MAX_SAID:  # checked before anything is allocated
            raise InvalidRequestError(f"{name}: a model has at most {MAX_SAID}")
    if any(len(name) > MAX_NAME_LENGTH for name in (message.name, *message.capabilities, *message.local_strategies)):
        raise InvalidRequestError(
            f"names of models, capabilities and strategies have at most {MAX_NAME_LENGTH} characters"
        )
    model = _model_from_proto(message)
    return replace(model, oldest_protocol_version=model.oldest_protocol_version or model.protocol_version)


def failure_to_proto(session_id: int, epoch: int, error: Exception) -> session_pb2.SessionFailure:
    """Encodes the failure of one session."""
    code, message = status_of(error)
    return session_pb2.SessionFailure(session_id=session_id, epoch=epoch, status_code=code.value[0], message=message)
