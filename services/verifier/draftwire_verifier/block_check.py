"""Checks what a session asks for, and its draft blocks, after the prefix that they name. Pure."""

from draftwire.engine.target_session import TargetSession
from draftwire.errors import BlockViolationError, InvalidRequestError, Violation
from draftwire.method.rounds import ReceivedBlock, TargetSessionSpec
from draftwire.verification import VerificationRule


def check_sampling(spec: TargetSessionSpec, vocab_size: int) -> None:
    """Checks the tokens that a session may draw.

    Raises:
        InvalidRequestError: some are beyond the vocabulary, or none is left.
    """
    sampling, stops = spec.parameters.sampling, spec.parameters.stop_token_ids
    sampling.check_vocabulary(vocab_size)
    allowed = sampling.allowed_token_ids
    possible = range(vocab_size) if allowed is None else allowed
    are_many = len(stops) >= len(possible)  # else the possible tokens need not be looked through
    if sampling.min_tokens and are_many and stops.issuperset(possible):
        raise InvalidRequestError("all tokens that are possible are stop tokens, which min_tokens keeps away")


def check_sender(block: ReceivedBlock, session: TargetSession) -> None:
    """Checks that a block comes from the drafter of its session.

    Raises:
        BlockViolationError: it does not.
    """
    if session.drafter_id != block.drafter_id:
        raise BlockViolationError(Violation.PEER, "block from a drafter that is not the session's")


def check_block(block: ReceivedBlock, spec: TargetSessionSpec, rule: VerificationRule) -> None:
    """Checks a block for a session.

    Raises:
        BlockViolationError: it violates the protocol.
    """
    if isinstance(block.draft, BlockViolationError):
        raise block.draft
    sampling, limit = spec.parameters.sampling, spec.parameters.max_draft_tokens
    if block.tree is not None:
        if not spec.max_tree_nodes:
            raise BlockViolationError(Violation.ENCODING, "token trees are not accepted in this session")
        block.tree.check(spec.max_tree_nodes, limit)
    elif len(block.token_ids) > limit:
        raise BlockViolationError(
            Violation.LENGTH, f"block of {len(block.token_ids)} draft tokens, the session's limit is {limit}"
        )
    if block.fence.prefix_len + block.depth >= spec.max_len:
        raise BlockViolationError(Violation.LENGTH, "block reaches beyond the session's max_len")
    # A greedy tree has no distributions, and may have come out as a chain.
    is_walked = bool(spec.max_tree_nodes) and sampling.greedy
    if rule.needs_draft_probs and not block.has_distributions and not is_walked:
        raise BlockViolationError(
            Violation.NO_DISTRIBUTIONS, f"rule {rule.name} needs the distributions that were drawn from"
        )
