"""Log-probabilities that a drafter stated for the tokens of a verdict. No torch here."""

import math
from collections.abc import Sequence

from draftwire.errors import BlockViolationError
from draftwire.method.encoding import TOTAL_WEIGHT, Decoded, Supports
from draftwire.method.rounds import ReceivedBlock
from draftwire.verification.deciding import Judgement


def of_drafter(block: ReceivedBlock | None, judgement: Judgement) -> list[float]:
    """Returns the drafter's log-probability of each token of a verdict; NaN after the block or if none were sent."""
    token_ids, given = judgement.token_ids, list[float]()
    if block is not None and block.has_distributions:
        assert not isinstance(block.draft, BlockViolationError), "such a block is refused"
        rows = list(range(min(len(block.token_ids), len(token_ids))))
        if block.tree is not None:  # where nothing follows, the drafter has stated nothing for the last token
            rows = block.tree.distributions_along(judgement.path)[: len(token_ids)]
        given = log_probs(block.draft, token_ids[: len(rows)], rows)
    return given + [math.nan] * (len(token_ids) - len(given))


def log_probs(decoded: Decoded, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> list[float]:
    """Returns the log-probability of tokens, nats; -inf for impossible ones.

    Args:
        decoded: the distributions.
        token_ids: the tokens.
        rows: of each token; by default token i is of row i.
    """
    values = []
    for row, token in zip(range(len(token_ids)) if rows is None else rows, token_ids, strict=True):
        if isinstance(decoded, Supports):
            weight = int(decoded.weights[row][decoded.token_ids[row] == token].max(initial=0))
            prob = weight / TOTAL_WEIGHT
        else:
            prob = float(decoded.probs[row, token]) if token < decoded.probs.shape[1] else 0.0
        values.append(min(0.0, math.log(prob)) if prob > 0.0 else -math.inf)
    return values
