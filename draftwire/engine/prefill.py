"""How much of the waiting prompts to read in a step, so that running sessions hardly notice."""

from collections.abc import Sequence
from dataclasses import dataclass, field

SMALLEST_CHUNK = 4
"""Tokens that are read in a step at least, so that every prompt gets on."""
LARGEST_CHUNK = 512
"""Tokens that are read in a step at most; bounds the memory that a step takes."""
CHUNKS_PER_TOKEN = 6
"""How many chunks have to fit into what may be added to a token. Four can delay it: at the drafter and at the verifier
alike, that of the step under way when its work arrives and that of the step that its work is part of. The time of two
more is for what reading costs besides: sessions fall out of step with each other, cores and memory are shared."""
PROBE_EVERY = 16
"""One of so many steps beside running sessions reads no prompt. Without such steps nobody would know what a chunk adds
where prompts never cease to wait: all of a step would count as the chunk's, and chunks would shrink to nothing."""
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
    beside: ChunkCost = field(default_factory=ChunkCost)
    """What prompt tokens cost in steps that serve running sessions as well."""
    alone: ChunkCost = field(default_factory=ChunkCost)
    """What they cost in steps of their own, the fixed cost of a step included."""

    _steps_beside: int = 0

    def learn(self, num_prompt_tokens: int, num_other_tokens: int, seconds: float) -> None:
        """Adds how long a step took."""
        cost = self.beside if num_other_tokens else self.alone
        cost.learn(num_prompt_tokens, num_other_tokens, seconds)

    def budget(self, sessions_run: bool, is_alone: bool = False) -> int:
        """Returns the tokens of prompts that the next step may read, all sessions together. Call once for each step.

        Args:
            sessions_run: whether any session is past its prompt and could be delayed.
            is_alone: whether the step does nothing else.
        """
        if not sessions_run:
            return LARGEST_CHUNK
        if not is_alone:
            self._steps_beside += 1
            if self._steps_beside % PROBE_EVERY == 0:
                return 0
        own, other = (self.alone, self.beside) if is_alone else (self.beside, self.alone)
        seconds_per_token = own.seconds_per_token
        if seconds_per_token is None:
            seconds_per_token = other.seconds_per_token
        if seconds_per_token is None:
            return SMALLEST_CHUNK
        fitting = self.max_added_latency_s / CHUNKS_PER_TOKEN / max(seconds_per_token, 1e-9)
        return int(min(LARGEST_CHUNK, max(SMALLEST_CHUNK, fitting)))


def _faded(old: float | None, new: float) -> float:
    return new if old is None else MEMORY * old + (1.0 - MEMORY) * new


def share(budget: int, wanted: Sequence[int], most: Sequence[int]) -> list[int]:
    """Divides a budget: half of it to the first, so that it gets on, the rest to those who need least, one by one.

    So short prompts pass long ones, prompts that came together are done one by one instead of all at the end, and no
    prompt waits for ever.

    Args:
        budget: tokens.
        wanted: tokens that each could use, in the order in which they came.
        most: tokens that each may have at most.
    """
    shares = [0] * len(wanted)
    first = [(0, -(-budget // 2))] if wanted else []
    shortest = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for index, part in [*first, *((index, budget) for index in shortest)]:
        given = min(most[index] - shares[index], part, budget)
        shares[index] += given
        budget -= given
    return shares
