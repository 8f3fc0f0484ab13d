"""What is expected of arms, and what is chosen by that: read-only views for users."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftwire_gateway.session.policy import DraftSource


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """What is expected of one arm."""

    length: int
    tokens_per_round: float
    round_s: float
    num_windows: int
    """In which it was measured; 0 if its time is inferred from other arms."""
    share: float
    """What sessions make of that, with prompts and waits, which are in no round."""
    num_nodes: int = 0
    """Draft tokens of a token tree; 0 for a chain."""

    @property
    def tokens_per_second(self) -> float:
        """Of each session."""
        return self.share * self.tokens_per_round / self.round_s


@dataclass(frozen=True, slots=True)
class LoadExplanation:
    """What the length is chosen by at one load."""

    min_sessions: int
    max_sessions: int
    length: int
    """The best one of the source; 0 if plain decoding is better. Another may be probed."""
    num_nodes: int
    """Draft tokens of the best token tree; 0 for a chain."""
    chosen: DraftSource | None
    """Who drafts at that load; None if nobody does."""
    estimates: Sequence[ArmEstimate]
    """Of lengths 0 to the largest; of plain decoding and the trees that were measured, if the source drafts trees.
    Empty before anything was measured."""
    row_s: float
    """Time by which one more row of each session lengthens the verifier's step, seconds; 0 if not known."""
    draft_token_s: float
    """Time that drafting takes for a token, seconds; 0 if not known."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the length of a source's drafts is chosen by."""

    source: DraftSource
    num_sessions: int
    """Of the pair."""
    survival: Sequence[float]
    """P(at least k tokens are accepted), k = 1 to the largest length; empty of trees, where it depends on their size.
    """
    num_drafts: int
    """That this is known from."""
    loads: Sequence[LoadExplanation]
    """Each load that there was."""
