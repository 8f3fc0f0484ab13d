"""How often draft tokens are accepted, by how sure their drafter was of their places. Pure."""

from collections.abc import Iterator
from enum import Enum

from draftwire.method.confidence import NUM_BUCKETS
from draftwire.method.rounds import Verdict


class PlaceFate(Enum):
    """Outcome of a place of a block."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """The tokens before it were accepted, and its own was not."""
    ENDED = "ended"
    """The block ended before it, since the drafter was not sure."""


def fates_of(verdict: Verdict) -> Iterator[tuple[int, PlaceFate]]:
    """Yields the bucket and the outcome of each place of a block that says how sure its drafter was. Places behind a
    rejected token have none: the target says nothing of them.
    """
    for place, bucket in enumerate(verdict.confidence_buckets):
        if place == verdict.num_draft_tokens:
            yield bucket, PlaceFate.ENDED
        elif place <= verdict.num_accepted_tokens:
            yield bucket, PlaceFate.ACCEPTED if place < verdict.num_accepted_tokens else PlaceFate.REJECTED


class BucketCounts:
    """Counts of places, by bucket and by what became of them."""

    def __init__(self) -> None:
        self.of_fate = {fate: [0] * NUM_BUCKETS for fate in PlaceFate}
        """Places of each outcome, `[NUM_BUCKETS]`."""

    def add(self, verdict: Verdict) -> None:
        """Counts a round."""
        for bucket, fate in fates_of(verdict):
            self.of_fate[fate][bucket] += 1

    def acceptance(self, bucket: int) -> float | None:
        """Returns the share of tokens that were accepted, of those of a bucket whose predecessors were; None before
        there is one. Of buckets that end blocks, those of the rounds in which none ends.
        """
        num_accepted = self.of_fate[PlaceFate.ACCEPTED][bucket]
        num_reached = num_accepted + self.of_fate[PlaceFate.REJECTED][bucket]
        return num_accepted / num_reached if num_reached else None
