"""How sure a drafter is of the next token, in buckets, and when that may end a block. Imports errors alone.

The confidence of a place is the largest probability of its row, at temperature 1 and before anything is added to it or
cut off it: a function of the tokens before the place, which are kept. So a block may end before a place that is not
sure, whether or not a token would have been drawn there. See docs/confidence.md.
"""

from draftwire.errors import InvalidRequestError

NUM_BUCKETS = 8
"""Number of buckets, of equal width from 0 to 1; a probability of 1 is in the last."""
MEASURED_EVERY = 32
"""Rounds of which one ends no block: what would have been cut off is never measured otherwise."""
_MEASURED = MEASURED_EVERY // 2
"""The first such round: in texts of every length it is about as rare."""


def bucket_of(confidence: float) -> int:
    """Returns the bucket of a probability."""
    return min(int(confidence * NUM_BUCKETS), NUM_BUCKETS - 1)


def stop_in(round_number: int, stop_below: float | None) -> float | None:
    """Returns how sure a drafter has to be in a round, of what is asked of it in all: by the round's number alone."""
    return 0.0 if stop_below is not None and round_number % MEASURED_EVERY == _MEASURED else stop_below


def check_stop(stop_below: float | None) -> float | None:
    """Returns what a request asks for.

    Raises:
        InvalidRequestError: it is no probability.
    """
    if stop_below is not None and not 0.0 <= stop_below <= 1.0:
        raise InvalidRequestError(f"stop_below must be in 0..1, not {stop_below}")
    return stop_below


def check_buckets(buckets: bytes, num_tokens: int) -> bytes:
    """Returns the buckets of the places of a block, and of the one that it ended before, if there is one.

    Raises:
        InvalidRequestError: there are others than that.
    """
    if buckets and len(buckets) not in (num_tokens, num_tokens + 1):
        raise InvalidRequestError(f"confidence of {len(buckets)} places, of {num_tokens} draft tokens")
    if buckets and max(buckets) >= NUM_BUCKETS:
        raise InvalidRequestError(f"a confidence is in 0..{NUM_BUCKETS - 1}")
    return buckets
