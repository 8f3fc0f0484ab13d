"""Statistics of a completion."""

from dataclasses import dataclass, field

from draftwire.method.rounds import Verdict


@dataclass(slots=True)
class Statistics:
    """Token counts and times of a completion. Durations are sums over its rounds, microseconds.

    What users get is named here alone: the message over gRPC has each field, and HTTP those from `num_ahead_hits` on.
    """

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that were in the verifier's prefix cache."""
    num_generated_tokens: int = 0
    num_emitted_tokens: int = 0
    """Tokens that the rounds committed, before the output was cut at a stop."""
    num_near_ties: int = 0
    """Tokens that floating-point rounding could have changed, under a rule that counts them."""
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    """Draft tokens, of token trees all of them."""
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)
    """Rounds that verified a block, by how many of its tokens were accepted: 0, 1, 2, ..."""
    draft_length_histogram: list[int] = field(default_factory=list)
    """Rounds by how many draft tokens were verified: 0, 1, 2, ..."""
    time_to_first_token_us: int = 0
    duration_us: int = 0
    calibration_us: int = 0
    draft_us: int = 0
    verify_us: int = 0
    queue_us: int = 0
    num_ahead_hits: int = 0
    """Rounds whose block was drafted before their text was known, there when they began, and judged."""
    num_ahead_late: int = 0
    """Rounds whose block was drafted before their text was known, and came after they began."""
    num_ahead_misses: int = 0
    """Rounds for which a drafter that may draft ahead had drafted no block, or none that was judged."""
    num_ahead_wasted_tokens: int = 0
    """Draft tokens of blocks that were drafted ahead for texts that did not come true, as far as they reached the
    verifier; and those that a drafter may have begun when the text ended at a stop string.
    """
    max_held_bytes: int = 0
    """Largest size of the blocks that the verifier held for the completion."""
    num_trees: int = 0
    """Rounds that verified a token tree."""
    num_draft_positions: int = 0
    """Draft tokens on the longest path of each block: what could have been accepted."""
    num_drafters_lost: int = 0
    num_verifiers_lost: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens emitted in a round with a block; 0 if there was none."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens over those that could have been accepted; 0 if none were drafted."""
        return self.num_accepted_tokens / self.num_draft_positions if self.num_draft_positions else 0.0

    def count_time(self, seconds: float) -> None:
        """Records the time from the request's arrival to the tokens of a round."""
        self.duration_us = int(seconds * 1e6)
        self.time_to_first_token_us = self.time_to_first_token_us or self.duration_us

    def count(self, verdict: Verdict) -> None:
        """Counts one round."""
        self.num_rounds += 1
        # After a move, generated tokens may be cached too.
        self.num_cached_prompt_tokens = min(verdict.num_cached_tokens, self.num_prompt_tokens)
        self.num_emitted_tokens += len(verdict.token_ids)
        self.num_near_ties += verdict.num_near_ties
        self.verify_us += verdict.verify_us
        self.queue_us += verdict.queue_us
        self.draft_length_histogram += [0] * (verdict.num_draft_tokens + 1 - len(self.draft_length_histogram))
        self.draft_length_histogram[verdict.num_draft_tokens] += 1
        if verdict.num_draft_tokens:
            self.num_drafts += 1
            self.num_draft_tokens += verdict.num_draft_tokens
            self.num_draft_positions += verdict.num_draft_positions
            self.num_accepted_tokens += verdict.num_accepted_tokens
            self.calibration_us += verdict.timings.calibration_us
            self.draft_us += verdict.timings.draft_us
            missing = verdict.num_draft_positions - len(self.num_accepted_tokens_per_pos)
            self.num_accepted_tokens_per_pos += [0] * missing
            # From 0 to all tokens accepted: one entry more than positions.
            self.acceptance_histogram += [0] * (verdict.num_draft_positions + 1 - len(self.acceptance_histogram))
            self.acceptance_histogram[verdict.num_accepted_tokens] += 1
            for position in range(verdict.num_accepted_tokens):
                self.num_accepted_tokens_per_pos[position] += 1
