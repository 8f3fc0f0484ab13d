"""Encoding and decoding of messages between services: protobuf to and from dataclasses. Enum value 0 is refused."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from draftwire.errors import BlockViolationError, InvalidRequestError, Violation
from draftwire.method.ahead_limits import MAX_BRANCHES, MAX_ROUNDS_AHEAD
from draftwire.method.encoding import Claim, DraftDistributions, decode
from draftwire.method.feature_format import FeatureEncoding
from draftwire.method.features import FeatureRequest, SessionFeatures
from draftwire.method.keys import KEY_BYTES
from draftwire.method.quantization import Encoding
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
    RoundOutcome,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
    WatchedGuess,
)
from draftwire.method.token_source import TokenSource
from draftwire.method.token_tree import TokenTree
from draftwire.method.tree_limits import MAX_TREE_NODES
from draftwire.models.description import ModelDescription, check_protocol
from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsMode, LogprobsRequest, PromptPart, TokenLogprob
from draftwire.requests.packed_logprobs import PackedTop, pack_top, unpack_top
from draftwire.requests.parameters import MAX_ALLOWED_TOKENS, MAX_BIASED_TOKENS, NUMBERS, SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.requests.session_parameters import SessionParameters
from draftwire.requests.structured_output import MAX_CHOICES, Form, StructuredOutput
from draftwire.runtime.form_messages import form_to_proto
from draftwire.runtime.status import status_of
from draftwire.runtime.traceparent import parse_own_traceparent
from draftwire.v1 import drafter_pb2, model_pb2, session_pb2, verifier_pb2

_ENCODINGS = {
    session_pb2.DISTRIBUTION_ENCODING_SPARSE_UINT16: Encoding.SPARSE_UINT16,
    session_pb2.DISTRIBUTION_ENCODING_DENSE_FLOAT32: Encoding.DENSE_FLOAT32,
    session_pb2.DISTRIBUTION_ENCODING_DENSE_FLOAT16: Encoding.DENSE_FLOAT16,
    session_pb2.DISTRIBUTION_ENCODING_ONE_HOT: Encoding.ONE_HOT,
    session_pb2.DISTRIBUTION_ENCODING_NONE: Encoding.NONE,
}
_ENCODING_NUMBERS = {value: key for key, value in _ENCODINGS.items()}
_FEATURE_ENCODINGS = {
    verifier_pb2.FEATURE_ENCODING_FLOAT32: FeatureEncoding.FLOAT32,
    verifier_pb2.FEATURE_ENCODING_BFLOAT16: FeatureEncoding.BFLOAT16,
    verifier_pb2.FEATURE_ENCODING_FLOAT8: FeatureEncoding.FLOAT8,
}
_FEATURE_NUMBERS = {value: key for key, value in _FEATURE_ENCODINGS.items()}

_EXTRAS = {
    session_pb2.EXTRA_TOKEN_KIND_PLAIN: TokenSource.PLAIN,
    session_pb2.EXTRA_TOKEN_KIND_RECOVERED: TokenSource.RECOVERED,
    session_pb2.EXTRA_TOKEN_KIND_BONUS: TokenSource.BONUS,
}
_EXTRA_NUMBERS = {value: key for key, value in _EXTRAS.items()}

MAX_SAID = 64
"""Most rules, and most capabilities, in a peer's model description."""
MAX_BLOCKS = 256
"""Most draft blocks in one message. A verifier with more sessions takes as many."""
MAX_NAME_LENGTH = 256
"""Most characters of a model's name: names are stored, logged, and label every series of the audit's metrics."""


PLAIN_PARAMETERS = tuple(field.name for field in fields(SessionParameters) if field.type in (bool, int, float, str))
"""Fields that messages hold unchanged, under the same names."""


def fence_to_proto(fence: Fence) -> session_pb2.Fence:
    """Encodes a fence."""
    return session_pb2.Fence(
        session_id=fence.session_id,
        epoch=fence.epoch,
        round=fence.round,
        prefix_len=fence.prefix_len,
        prefix_hash=fence.prefix_hash,
    )


def fence_from_proto(message: session_pb2.Fence) -> Fence:
    """Decodes a fence."""
    return Fence(message.session_id, message.epoch, message.round, message.prefix_len, message.prefix_hash)


def sampling_to_proto(params: SamplingParams) -> session_pb2.SamplingParameters:
    """Encodes sampling parameters, all of them explicitly."""
    numbers = {name: getattr(params, name) for name in NUMBERS}
    return session_pb2.SamplingParameters(
        **numbers,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=sorted(params.allowed_token_ids or ()),
        structured_output=form_to_proto(params.structured_output),
    )


def sampling_from_proto(message: session_pb2.SamplingParameters) -> SamplingParams:
    """Decodes sampling parameters; absent fields have their defaults.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    if len(message.logit_bias) > MAX_BIASED_TOKENS:  # checked before anything is allocated
        raise InvalidRequestError(f"logit_bias takes at most {MAX_BIASED_TOKENS} token ids")
    if len(message.allowed_token_ids) > MAX_ALLOWED_TOKENS:
        raise InvalidRequestError(f"allowed_token_ids takes at most {MAX_ALLOWED_TOKENS} token ids")
    numbers = {field.name: value for field, value in message.ListFields() if field.name in NUMBERS}
    return SamplingParams(
        **numbers,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=frozenset(message.allowed_token_ids) or None,
        structured_output=_structured_from_proto(message),
    )


def _structured_from_proto(message: session_pb2.SamplingParameters) -> StructuredOutput | None:
    if not message.HasField("structured_output"):
        return None
    name = message.structured_output.WhichOneof("form")
    if name is None:
        raise InvalidRequestError("structured_output has no form")
    value = getattr(message.structured_output, name)
    if name != Form.CHOICES.value:
        return StructuredOutput(Form(name), (value,))
    if len(value.texts) > MAX_CHOICES:  # checked before anything is allocated
        raise InvalidRequestError(f"structured_output: choices takes at most {MAX_CHOICES} texts")
    return StructuredOutput(Form.CHOICES, tuple(value.texts))


def block_to_proto(block: DraftBlock) -> session_pb2.DraftBlock:
    """Encodes a draft block."""
    return session_pb2.DraftBlock(
        fence=fence_to_proto(block.fence),
        token_ids=block.token_ids,
        parent_indices=block.parents,
        distributions=session_pb2.DraftDistributions(
            encoding=_ENCODING_NUMBERS[block.distributions.encoding],
            vocab_size=block.distributions.vocab_size,
            data=block.distributions.data,
            support_sizes=block.distributions.support_sizes,
            wide_sizes=block.distributions.wide_sizes,
        ),
        calibration_duration_us=block.timings.calibration_us,
        draft_duration_us=block.timings.draft_us,
        permit=permit_to_proto(block.permit) if block.permit is not None else None,
        is_ahead=block.is_ahead,
    )


def permit_to_proto(permit: Permit) -> session_pb2.DraftPermit:
    """Encodes a permit."""
    return session_pb2.DraftPermit(number=permit.number, token=permit.token)


def permit_from_proto(message: session_pb2.DraftPermit) -> Permit:
    """Decodes a permit; its token is not verified."""
    return Permit(message.number, message.token)


def identity_to_proto(identity: DrafterIdentity) -> verifier_pb2.DrafterIdentity:
    """Encodes the identity of a drafter."""
    return verifier_pb2.DrafterIdentity(drafter_id=identity.drafter_id, token=identity.token)


def identity_from_proto(message: verifier_pb2.DrafterIdentity) -> DrafterIdentity:
    """Decodes the identity of a drafter; its token is not verified.

    Raises:
        InvalidRequestError: its token is none.
    """
    return DrafterIdentity(message.drafter_id, _checked_key(message.token))


def blocks_from_proto(
    messages: Sequence[session_pb2.DraftBlock],
    drafter_id: int,
    vocab_size: int,
    max_draft_tokens: int,
    max_tree_nodes: int = 0,
) -> list[ReceivedBlock]:
    """Decodes and checks the draft blocks of one message together. A violation is stored in `draft` of its block.

    Args:
        messages: the blocks.
        drafter_id: the sender.
        vocab_size: of the target.
        max_draft_tokens: longer blocks are refused without decoding them.
        max_tree_nodes: the same for token trees; 0 refuses all of them.
    """
    read = [_claim_from_proto(message, max_draft_tokens, max_tree_nodes) for message in messages]
    decoded = iter(decode([claim for claim in read if isinstance(claim, Claim)], vocab_size))
    return [
        ReceivedBlock(
            fence=fence_from_proto(message.fence),
            token_ids=claim.token_ids if isinstance(claim, Claim) else [],
            draft=next(decoded) if isinstance(claim, Claim) else claim,
            has_distributions=message.distributions.encoding != session_pb2.DISTRIBUTION_ENCODING_NONE,
            drafter_id=drafter_id,
            timings=DraftTimings(message.calibration_duration_us, message.draft_duration_us),
            permit=permit_from_proto(message.permit) if message.HasField("permit") else None,
            is_ahead=message.is_ahead,
            tree=claim.tree if isinstance(claim, Claim) else None,
        )
        for message, claim in zip(messages, read, strict=True)
    ]


def _claim_from_proto(
    message: session_pb2.DraftBlock, max_draft_tokens: int, max_tree_nodes: int
) -> Claim | BlockViolationError:
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
    try:
        tree = TokenTree.of(message.parent_indices, len(message.token_ids)) if is_tree else None
    except BlockViolationError as violation:
        return violation
    distributions = DraftDistributions(
        _ENCODINGS[stated.encoding],
        stated.vocab_size,
        stated.data,
        tuple(stated.support_sizes),
        tuple(stated.wide_sizes),
    )
    return Claim(list(message.token_ids), distributions, tree)


def verdict_to_proto(verdict: Verdict) -> session_pb2.Verdict:
    """Encodes a verdict."""
    return session_pb2.Verdict(
        fence=fence_to_proto(verdict.fence),
        num_draft_tokens=verdict.num_draft_tokens,
        num_accepted_tokens=verdict.num_accepted_tokens,
        token_ids=verdict.token_ids,
        extra_token_kind=_EXTRA_NUMBERS[verdict.extra],
        plain_rounds_left=verdict.plain_rounds_left,
        verify_duration_us=verdict.verify_us,
        queue_duration_us=verdict.queue_us,
        calibration_duration_us=verdict.timings.calibration_us,
        draft_duration_us=verdict.timings.draft_us,
        num_cached_tokens=verdict.num_cached_tokens,
        num_near_ties=verdict.num_near_ties,
        logprobs=[token.logprob for token in verdict.logprobs],
        top_logprobs=top_to_proto(verdict.logprobs),
        draft_logprobs=verdict.draft_logprobs,
        local_strategy=verdict.local_strategy,
        watched=None
        if verdict.watched is None
        else session_pb2.WatchedGuess(has_guess=verdict.watched.has_guess, num_right=verdict.watched.num_right),
        next_is_held=verdict.next_is_held,
        is_ahead=verdict.is_ahead,
        num_wasted_draft_tokens=verdict.num_wasted_draft_tokens,
        held_bytes=verdict.held_bytes,
        draft_depth=verdict.draft_depth,
        mask_duration_us=verdict.mask_us,
    )


def verdict_from_proto(message: session_pb2.Verdict) -> Verdict:
    """Decodes a verdict.

    Raises:
        InvalidRequestError: the kind of the extra token is unknown, or log-probabilities do not fit the tokens.
    """
    if message.extra_token_kind not in _EXTRAS:
        raise InvalidRequestError(f"unknown kind of extra token {message.extra_token_kind}")
    return Verdict(
        fence=fence_from_proto(message.fence),
        token_ids=list(message.token_ids),
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        extra=_EXTRAS[message.extra_token_kind],
        plain_rounds_left=message.plain_rounds_left,
        verify_us=message.verify_duration_us,
        queue_us=message.queue_duration_us,
        timings=DraftTimings(message.calibration_duration_us, message.draft_duration_us),
        num_cached_tokens=message.num_cached_tokens,
        num_near_ties=message.num_near_ties,
        logprobs=tokens_from_proto(message),
        draft_logprobs=_checked_draft_logprobs(message),
        local_strategy=message.local_strategy,
        watched=WatchedGuess(message.watched.has_guess, message.watched.num_right)
        if message.HasField("watched")
        else None,
        next_is_held=message.next_is_held,
        is_ahead=message.is_ahead,
        num_wasted_draft_tokens=message.num_wasted_draft_tokens,
        held_bytes=message.held_bytes,
        draft_depth=message.draft_depth,
        mask_us=message.mask_duration_us,
    )


def _checked_draft_logprobs(message: session_pb2.Verdict) -> list[float]:
    if message.draft_logprobs and len(message.draft_logprobs) != len(message.token_ids):
        raise InvalidRequestError(
            f"{len(message.draft_logprobs)} log-probabilities of drafters, of {len(message.token_ids)} tokens"
        )
    values = list(message.draft_logprobs)
    if any(value > 0.0 for value in values):
        raise InvalidRequestError("a log-probability of a drafter is a number of at most 0, or NaN")
    return values


def top_to_proto(tokens: Sequence[TokenLogprob]) -> session_pb2.TopLogprobs | None:
    """Encodes the likeliest tokens; None if there are none."""
    packed = pack_top(tokens)
    if packed is None:
        return None
    return session_pb2.TopLogprobs(num_top=packed.num_top, token_ids=packed.token_ids, logprobs=packed.logprobs)


def tokens_from_proto(message: session_pb2.Verdict | verifier_pb2.PromptRead) -> list[TokenLogprob]:
    """Decodes the log-probabilities of a message's tokens; empty if it has none.

    Raises:
        InvalidRequestError: the numbers do not fit the tokens.
    """
    top = message.top_logprobs
    packed = PackedTop(top.num_top, top.token_ids, top.logprobs) if message.HasField("top_logprobs") else None
    return unpack_top(message.token_ids, message.logprobs, packed)


def prompt_read_to_proto(read: PromptRead) -> verifier_pb2.PromptRead:
    """Encodes log-probabilities of prompt tokens."""
    return verifier_pb2.PromptRead(
        session_id=read.session_id,
        epoch=read.epoch,
        first_position=read.part.first_position,
        token_ids=[token.token_id for token in read.part.tokens],
        logprobs=[token.logprob for token in read.part.tokens],
        top_logprobs=top_to_proto(read.part.tokens),
    )


def prompt_read_from_proto(message: verifier_pb2.PromptRead) -> PromptRead:
    """Decodes log-probabilities of prompt tokens.

    Raises:
        InvalidRequestError: the numbers do not fit the tokens.
    """
    part = PromptPart(message.first_position, tokens_from_proto(message))
    return PromptRead(message.session_id, message.epoch, part)


def plain_run_to_proto(run: PlainRun) -> verifier_pb2.PlainRun:
    """Encodes a plain run."""
    draft = _local_to_proto(run.draft)
    return verifier_pb2.PlainRun(fence=fence_to_proto(run.fence), num_rounds=run.num_rounds, draft=draft)


def plain_run_from_proto(message: verifier_pb2.PlainRun) -> PlainRun:
    """Decodes a plain run."""
    draft = _local_from_proto(message.draft) if message.HasField("draft") else None
    return PlainRun(fence_from_proto(message.fence), message.num_rounds, draft)


def _local_to_proto(draft: LocalDraft | None) -> verifier_pb2.LocalDraft | None:
    if draft is None:
        return None
    return verifier_pb2.LocalDraft(
        strategy=draft.strategy, num_draft_tokens=draft.num_draft_tokens, instead=draft.instead
    )


def _local_from_proto(message: verifier_pb2.LocalDraft) -> LocalDraft:
    return LocalDraft(message.strategy, message.num_draft_tokens, message.instead)


def calibration_to_proto(calibration: Calibration) -> drafter_pb2.Calibration:
    """Encodes a calibration."""
    return drafter_pb2.Calibration(
        fence=fence_to_proto(calibration.fence),
        base_len=calibration.base_len,
        token_ids=calibration.token_ids,
        num_draft_tokens=calibration.num_draft_tokens,
        permit=permit_to_proto(calibration.permit) if calibration.permit is not None else None,
        max_rounds_ahead=calibration.max_rounds_ahead,
        tree=_tree_to_proto(calibration.tree),
    )


def calibration_from_proto(message: drafter_pb2.Calibration) -> Calibration:
    """Decodes a calibration.

    Raises:
        InvalidRequestError: its permit is none, it lets the drafter go too far ahead, or its tree is none.
    """
    return Calibration(
        fence=fence_from_proto(message.fence),
        base_len=message.base_len,
        token_ids=list(message.token_ids),
        num_draft_tokens=message.num_draft_tokens,
        permit=_permit_of(message),
        max_rounds_ahead=_at_most(message.max_rounds_ahead, MAX_ROUNDS_AHEAD, "max_rounds_ahead"),
        tree=_tree_from_proto(message.tree) if message.HasField("tree") else None,
    )


def _tree_to_proto(tree: DraftTree | None) -> drafter_pb2.DraftTree | None:
    if tree is None:
        return None
    shape = () if tree.shape is None else tree.shape.parents
    return drafter_pb2.DraftTree(num_nodes=tree.num_nodes, parent_indices=shape)


def _tree_from_proto(message: drafter_pb2.DraftTree) -> DraftTree:
    num_nodes, parents = message.num_nodes, message.parent_indices
    if not 1 <= num_nodes <= MAX_TREE_NODES:
        raise InvalidRequestError(f"a tree to draft has 1 to {MAX_TREE_NODES} tokens, not {num_nodes}")
    if not parents:
        return DraftTree(num_nodes)
    try:
        shape = TokenTree.of(parents, num_nodes)
    except BlockViolationError as violation:
        raise InvalidRequestError(f"a tree to draft: {violation}") from None
    if list(parents) != sorted(parents):
        raise InvalidRequestError("a tree to draft: its parents are not in order, depth by depth")
    return DraftTree(num_nodes, shape)


def outcomes_to_proto(outcomes: Sequence[RoundOutcome]) -> verifier_pb2.RoundOutcomes:
    """Encodes how rounds ended."""
    return verifier_pb2.RoundOutcomes(
        outcomes=[
            verifier_pb2.RoundOutcome(fence=fence_to_proto(outcome.fence), token_ids=outcome.token_ids)
            for outcome in outcomes
        ]
    )


def outcomes_from_proto(message: verifier_pb2.RoundOutcomes) -> list[RoundOutcome]:
    """Decodes how rounds ended."""
    return [RoundOutcome(fence_from_proto(one.fence), list(one.token_ids)) for one in message.outcomes]


def feature_source_to_proto(fingerprint: bytes, encoding: FeatureEncoding) -> verifier_pb2.FeatureSource:
    """Encodes which features a drafter needs."""
    return verifier_pb2.FeatureSource(fingerprint=fingerprint, encoding=_FEATURE_NUMBERS[encoding])


def feature_encoding_from_proto(message: verifier_pb2.FeatureSource) -> FeatureEncoding:
    """Decodes how features are to be sent.

    Raises:
        InvalidRequestError: the encoding is unknown.
    """
    encoding = _FEATURE_ENCODINGS.get(message.encoding)
    if encoding is None:
        raise InvalidRequestError(f"unknown encoding {message.encoding} of features")
    return encoding


def feature_requests_to_proto(requests: Sequence[FeatureRequest]) -> verifier_pb2.FeatureRequests:
    """Encodes requests of features."""
    return verifier_pb2.FeatureRequests(
        requests=[
            verifier_pb2.FeatureRequest(
                session_id=request.session_id,
                epoch=request.epoch,
                permit=permit_to_proto(request.permit),
                limit=request.limit,
                first_position=request.first_position,
            )
            for request in requests
        ]
    )


def feature_requests_from_proto(message: verifier_pb2.FeatureRequests) -> list[FeatureRequest]:
    """Decodes requests of features."""
    return [
        FeatureRequest(
            one.session_id,
            one.epoch,
            permit_from_proto(one.permit),
            one.limit,
            one.first_position if one.HasField("first_position") else None,
        )
        for one in message.requests
    ]


def features_to_proto(features: SessionFeatures) -> verifier_pb2.SessionFeatures:
    """Encodes features of a session."""
    return verifier_pb2.SessionFeatures(
        session_id=features.session_id,
        epoch=features.epoch,
        first_position=features.first_position,
        num_positions=features.num_positions,
        rows=features.rows,
        scales=features.scales,
    )


def features_from_proto(message: verifier_pb2.SessionFeatures) -> SessionFeatures:
    """Decodes features of a session, whose sizes are not checked."""
    return SessionFeatures(
        message.session_id,
        message.epoch,
        message.first_position,
        message.num_positions,
        message.rows,
        message.scales,
    )


def rule_to_proto(rule: RuleFacts) -> session_pb2.VerificationRule:
    """Encodes the properties of a rule."""
    return session_pb2.VerificationRule(
        name=rule.name,
        is_lossless=rule.is_lossless,
        needs_draft_probs=rule.needs_draft_probs,
        is_coupled=rule.is_coupled,
        takes_trees=rule.takes_trees,
    )


def rule_from_proto(message: session_pb2.VerificationRule) -> RuleFacts:
    """Decodes the properties of a rule.

    Raises:
        InvalidRequestError: the name is not valid.
    """
    return RuleFacts(
        message.name, message.is_lossless, message.needs_draft_probs, message.is_coupled, message.takes_trees
    )


def parameters_to_proto(parameters: SessionParameters) -> session_pb2.SessionParameters:
    """Encodes the parameters that both services receive for a session."""
    plain = {name: getattr(parameters, name) for name in PLAIN_PARAMETERS}
    return session_pb2.SessionParameters(
        **plain,
        sampling=sampling_to_proto(parameters.sampling),
        rule=rule_to_proto(parameters.rule),
        stop_token_ids=sorted(parameters.stop_token_ids),
    )


def parameters_from_proto(message: session_pb2.SessionParameters) -> SessionParameters:
    """Decodes the parameters that both services receive for a session.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    _check_traceparent(message.traceparent)
    plain: dict[str, Any] = {name: getattr(message, name) for name in PLAIN_PARAMETERS}
    return SessionParameters(
        **plain,
        sampling=sampling_from_proto(message.sampling),
        rule=rule_from_proto(message.rule),
        stop_token_ids=frozenset(message.stop_token_ids),
    )


def target_spec_to_proto(spec: TargetSessionSpec, lease_id: int) -> verifier_pb2.OpenTargetSessionRequest:
    """Encodes the request to open a session on a verifier."""
    return verifier_pb2.OpenTargetSessionRequest(
        lease_id=lease_id,
        session_id=spec.session_id,
        epoch=spec.epoch,
        first_round=spec.first_round,
        token_ids=spec.token_ids,
        parameters=parameters_to_proto(spec.parameters),
        verifying_key=spec.verifying_key,
        plain_rounds=spec.plain_rounds,
        max_len=spec.max_len,
        permit_key=spec.permit_key,
        logprobs=spec.logprobs.logprobs,
        prompt_logprobs=spec.logprobs.prompt_logprobs,
        logprobs_mode=spec.logprobs.mode.value if spec.logprobs != NO_LOGPROBS else "",
        draft_logprobs=spec.reports_draft_logprobs,
        watched=_local_to_proto(spec.watched),
        max_held_blocks=spec.max_held_blocks,
        max_tree_nodes=spec.max_tree_nodes,
    )


def target_spec_from_proto(message: verifier_pb2.OpenTargetSessionRequest) -> TargetSessionSpec:
    """Decodes the request to open a session on a verifier.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return TargetSessionSpec(
        session_id=message.session_id,
        epoch=message.epoch,
        first_round=message.first_round,
        token_ids=list(message.token_ids),
        parameters=parameters_from_proto(message.parameters),
        verifying_key=_checked_key(message.verifying_key),
        plain_rounds=message.plain_rounds,
        max_len=message.max_len,
        permit_key=_checked_key(message.permit_key) if message.permit_key else b"",
        logprobs=LogprobsRequest(
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            mode=LogprobsMode.named(message.logprobs_mode) if message.logprobs_mode else LogprobsMode.RAW,
        ),
        reports_draft_logprobs=message.draft_logprobs,
        watched=_local_from_proto(message.watched) if message.HasField("watched") else None,
        max_held_blocks=_at_most(message.max_held_blocks, MAX_BRANCHES, "max_held_blocks"),
        max_tree_nodes=_at_most(message.max_tree_nodes, MAX_TREE_NODES, "max_tree_nodes"),
    )


def draft_spec_to_proto(spec: DraftSessionSpec, lease_id: int) -> drafter_pb2.OpenDraftSessionRequest:
    """Encodes the request to open a session on a drafter."""
    return drafter_pb2.OpenDraftSessionRequest(
        lease_id=lease_id,
        session_id=spec.session_id,
        epoch=spec.epoch,
        token_ids=spec.token_ids,
        parameters=parameters_to_proto(spec.parameters),
        drafting_key=spec.drafting_key,
        verifier_address=spec.verifier_address,
        target_vocab_size=spec.target_vocab_size,
        max_len=spec.max_len,
        permit=permit_to_proto(spec.permit) if spec.permit is not None else None,
        max_branches=spec.max_branches,
        max_held_blocks=spec.max_held_blocks,
        max_tree_nodes=spec.max_tree_nodes,
    )


def draft_spec_from_proto(message: drafter_pb2.OpenDraftSessionRequest) -> DraftSessionSpec:
    """Decodes the request to open a session on a drafter.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return DraftSessionSpec(
        session_id=message.session_id,
        epoch=message.epoch,
        token_ids=list(message.token_ids),
        parameters=parameters_from_proto(message.parameters),
        drafting_key=_checked_key(message.drafting_key),
        verifier_address=message.verifier_address,
        target_vocab_size=message.target_vocab_size,
        max_len=message.max_len,
        permit=_permit_of(message),
        max_branches=_at_most(message.max_branches, MAX_BRANCHES, "max_branches"),
        max_held_blocks=_at_most(message.max_held_blocks, MAX_BRANCHES, "max_held_blocks"),
        max_tree_nodes=_at_most(message.max_tree_nodes, MAX_TREE_NODES, "max_tree_nodes"),
    )


def send_drafted_to_proto(command: SendDrafted) -> drafter_pb2.SendDrafted:
    """Encodes the command to send a block as far as it is drawn."""
    return drafter_pb2.SendDrafted(session_id=command.session_id, epoch=command.epoch, round=command.round)


def send_drafted_from_proto(message: drafter_pb2.SendDrafted) -> SendDrafted:
    """Decodes the command to send a block as far as it is drawn."""
    return SendDrafted(message.session_id, message.epoch, message.round)


def block_sent_to_proto(sent: BlockSent) -> drafter_pb2.BlockSent:
    """Encodes the reply to a command to send a block."""
    return drafter_pb2.BlockSent(session_id=sent.session_id, epoch=sent.epoch, round=sent.round)


def block_sent_from_proto(message: drafter_pb2.BlockSent) -> BlockSent:
    """Decodes the reply to a command to send a block."""
    return BlockSent(message.session_id, message.epoch, message.round)


def model_to_proto(model: ModelDescription) -> model_pb2.ModelDescription:
    """Encodes a model's description."""
    return model_pb2.ModelDescription(
        protocol_version=model.protocol_version,
        name=model.name,
        revision=model.revision,
        dtype=model.dtype,
        vocabulary_fingerprint=model.vocabulary_fingerprint,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        stop_token_ids=model.stop_token_ids,
        weights_fingerprint=model.weights_fingerprint,
        oldest_protocol_version=model.oldest_protocol_version,
        capabilities=sorted(model.capabilities),
        rules=[rule_to_proto(rule) for rule in model.rules],
        local_strategies=model.local_strategies,
        max_tree_nodes=model.max_tree_nodes,
    )


def model_from_proto(message: model_pb2.ModelDescription) -> ModelDescription:
    """Decodes a model's description.

    Raises:
        ModelMismatchError: no protocol version is supported by both peers.
        InvalidRequestError: a list or a name is too long, or the name of a rule is not valid.
    """
    check_protocol(message.name, message.oldest_protocol_version or message.protocol_version, message.protocol_version)
    for name in ("rules", "capabilities", "local_strategies"):
        if len(getattr(message, name)) > MAX_SAID:  # checked before anything is allocated
            raise InvalidRequestError(f"{name}: a model has at most {MAX_SAID}")
    if any(len(name) > MAX_NAME_LENGTH for name in (message.name, *message.capabilities, *message.local_strategies)):
        raise InvalidRequestError(
            f"names of models, capabilities and strategies have at most {MAX_NAME_LENGTH} characters"
        )
    return ModelDescription(
        name=message.name,
        revision=message.revision,
        dtype=message.dtype,
        vocabulary_fingerprint=message.vocabulary_fingerprint,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        stop_token_ids=tuple(message.stop_token_ids),
        weights_fingerprint=message.weights_fingerprint,
        protocol_version=message.protocol_version,
        oldest_protocol_version=message.oldest_protocol_version or message.protocol_version,
        capabilities=frozenset(message.capabilities),
        rules=tuple(rule_from_proto(rule) for rule in message.rules),
        local_strategies=tuple(message.local_strategies),
        max_tree_nodes=message.max_tree_nodes,
    )


def _at_most(value: int, most: int, name: str) -> int:
    if value > most:
        raise InvalidRequestError(f"{name} is at most {most}")
    return value


def _checked_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise InvalidRequestError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def _permit_of(message: drafter_pb2.OpenDraftSessionRequest | drafter_pb2.Calibration) -> Permit | None:
    if not message.HasField("permit"):
        return None
    permit = permit_from_proto(message.permit)
    if len(permit.token) != KEY_BYTES:
        raise InvalidRequestError(f"a permit's token has {KEY_BYTES} bytes, not {len(permit.token)}")
    return permit


def _check_traceparent(header: str) -> None:
    if header and parse_own_traceparent(header) is None:
        raise InvalidRequestError("traceparent is not one of W3C Trace Context, version 00")


def failure_to_proto(session_id: int, epoch: int, error: Exception) -> session_pb2.SessionFailure:
    """Encodes the failure of one session."""
    code, message = status_of(error)
    return session_pb2.SessionFailure(session_id=session_id, epoch=epoch, status_code=code.value[0], message=message)
