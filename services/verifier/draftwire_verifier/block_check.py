"""Checks the draft blocks of a session, after the prefix that they name. Pure."""

from draftwire.errors import BlockViolationError, InvalidRequestError, Violation
from draftwire.method.rounds import ReceivedBlock, TargetSessionSpec
from draftwire.verification import VerificationRule
from draftwire.verification.tree_choice import tree_rule_for


def check_trees(spec: TargetSessionSpec, rule: VerificationRule, most_nodes: int) -> None:
    """Checks that a session may have token trees, if it asks for them.

    Args:
        spec: of the session.
        rule: of the session.
        most_nodes: largest tree that the verifier judges.

    Raises:
        InvalidRequestError: it may not.
    """
    if not spec.max_tree_nodes:
        return
    if spec.max_tree_nodes > most_nodes:
        raise InvalidRequestError(f"num_draft_nodes {spec.max_tree_nodes} is above the verifier's limit {most_nodes}")
    if spec.max_held_blocks:
        raise InvalidRequestError("a session that holds blocks has no token trees")
    tree_rule_for(rule, spec.parameters.sampling)


def check_block(block: ReceivedBlock, spec: TargetSessionSpec, rule: VerificationRule) -> None:
    """Checks a block for a session.

    Args:
        block: to be judged.
        spec: of the session.
        rule: of the session.

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
