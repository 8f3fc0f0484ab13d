"""How much of the waiting prompts to read in a step, so that running sessions hardly notice."""

from collections.abc import Sequence
from dataclasses import dataclass, field

SMALLEST_CHUNK = 8
"""Tokens that are read in a step at least, so that every prompt gets on."""
LARGEST_CHUNK = 512
"""Tokens that are read in a step at most; bounds the memory that a step takes."""
CHUNKS_PER_TOKEN = 4
"""How many chunks can delay one token of a running session: at the drafter and at the verifier alike, that of the step
under way when its work arrives and that of the step that its work is part of."""
MEMORY = 0.8
"""Weight of what was learnt before, for each step."""
SMALLEST_SHARE = 0.05
"""Of a step with a chunk, the chunk takes at least this share of the time, whatever was learnt."""


@dataclass(slots=True)
class ChunkCost:
    """Learns what a prompt token adds to a step, from steps with and without prompt tokens."""

    _without: dict[int, float] = field(default_factory=dict)  # by magnitude of the other tokens: seconds
    _with: tuple[float, float] | None = None  # prompt tokens, and the seconds that they added

    def learn(self, num_prompt_tokens: int, num_other_tokens: int, seconds: float) -> None:
        """Adds how long a step took; older steps fade."""
        magnitude = num_other_tokens.bit_length()
        if num_prompt_tokens == 0:
            self._without[magnitude] = _faded(self._without.get(magnitude), seconds)
            return
        # A smaller step stands in for one of a size that was never seen: what is unknown counts as the chunk's.
        known = max((size for size in self._without if size <= magnitude), default=None)
        alone = self._without[known] if known is not None else 0.0
        added = max(seconds - alone, SMALLEST_SHARE * seconds)
        tokens, total = self._with or (None, None)
        self._with = _faded(tokens, num_prompt_tokens), _faded(total, added)

    @property
    def seconds_per_token(self) -> float | None:
        """What a prompt token adds, seconds; None before the first was read."""
        return self._with[1] / self._with[0] if self._with is not None else None


@dataclass(slots=True)
class PrefillPacer:
    """Says how many prompt tokens the next step may read."""

    max_added_latency_s: float
    """How long the reading of prompts may delay a token of a running session, drafter and verifier together."""
    cost: ChunkCost = field(default_factory=ChunkCost)

    def budget(self, sessions_run: bool) -> int:
        """Returns the tokens of prompts that the next step may read, all sessions together.

        Args:
            sessions_run: whether any session is past its prompt and could be delayed.
        """
        if not sessions_run:
            return LARGEST_CHUNK
        seconds_per_token = self.cost.seconds_per_token
        if seconds_per_token is None:
            return SMALLEST_CHUNK
        fitting = self.max_added_latency_s / CHUNKS_PER_TOKEN / max(seconds_per_token, 1e-9)
        return int(min(LARGEST_CHUNK, max(SMALLEST_CHUNK, fitting)))


def _faded(old: float | None, new: float) -> float:
    return new if old is None else MEMORY * old + (1.0 - MEMORY) * new


def share(budget: int, wanted: Sequence[int]) -> list[int]:
    """Divides a budget evenly; what one does not need goes to the others. Short prompts are not stuck behind long ones.

    Args:
        budget: tokens.
        wanted: tokens that each could use; where there are more of them than tokens, the first ones get one.
    """
    shares = [0] * len(wanted)
    waiting = [index for index, tokens in enumerate(wanted) if tokens]
    while budget and waiting:
        each = max(1, budget // len(waiting))
        for index in waiting:
            given = min(each, wanted[index] - shares[index], budget)
            shares[index] += given
            budget -= given
        waiting = [index for index in waiting if shares[index] < wanted[index]]
    return shares
