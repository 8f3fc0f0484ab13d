"""Chunked prefill: how many prompt tokens a step may read, so that decoding sessions are hardly delayed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

SMALLEST_CHUNK = 4
"""Fewest prompt tokens in a chunk, so that every prompt makes progress."""
LARGEST_CHUNK = 512
"""Most prompt tokens in a step; bounds the memory that a step takes."""
CHUNKS_PER_TOKEN = 6
"""Chunks that have to fit into the latency that may be added to a token. Four can delay a token: at drafter and
verifier each, the chunk of the step that runs when its work arrives and that of the step that includes its work. Two
more cover indirect costs: sessions fall out of step with each other, and cores and memory are shared."""
LONG_SHARE = 0.25
"""Share of the time of a step without prompts for which a long step may read a prompt of more than `LARGEST_CHUNK`
unread tokens: to wait for that is little beside the step itself. A shorter one it may read for as long as a step: while
it waits, its text's place in the steps is empty, and in fewer chunks it takes no more from the others."""
MOST_SHARE = 1.5
"""The same for all prompts together."""
PROBE_EVERY = 16
"""One in so many steps with decoding sessions reads no prompt, the first one included. Without such steps the cost of a
chunk could not be measured while prompts are always waiting: the whole step would count as the chunk's, and chunks
would shrink to the minimum."""
MEMORY = 0.8
"""Weight of the previous estimate in the exponential moving average, for each step."""
SMALLEST_SHARE = 0.05
"""Lower bound of a chunk's share of its step's time, whatever the estimate."""


@dataclass(slots=True)
class ChunkCost:
    """Estimates the time that a prompt token adds to a step, from steps with and without prompt tokens."""

    _without: dict[int, float] = field(default_factory=dict)  # seconds of a step, by bit length of its other tokens
    _with: tuple[float, float] | None = None  # averages: prompt tokens of a step, and the seconds that they added

    def learn(self, num_prompt_tokens: int, num_other_tokens: int, seconds: float) -> None:
        """Adds the time of a step to the moving averages."""
        magnitude = num_other_tokens.bit_length()
        if num_prompt_tokens == 0:
            self._without[magnitude] = _faded(self._without.get(magnitude), seconds)
            return
        # For a size that was never seen, the next smaller one is used: the difference counts as the chunk's.
        known = max((size for size in self._without if size <= magnitude), default=None)
        alone = self._without[known] if known is not None else 0.0
        added = max(seconds - alone, SMALLEST_SHARE * seconds)
        tokens, total = self._with or (None, None)
        self._with = _faded(tokens, num_prompt_tokens), _faded(total, added)

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds that a prompt token adds; None before the first was read."""
        return self._with[1] / self._with[0] if self._with is not None else None


@dataclass(slots=True)
class PrefillPacer:
    """Limits the prompt tokens of each step to a latency target."""

    max_added_latency_s: float
    """How long prefill may delay a token of a decoding session, at drafter and verifier together. Where steps are long,
    a chunk may be a share of one: see `MOST_SHARE`."""
    beside: ChunkCost = field(default_factory=ChunkCost)
    """Cost of prompt tokens in steps that serve decoding sessions as well."""
    alone: ChunkCost = field(default_factory=ChunkCost)
    """Cost of prompt tokens in steps of their own, the fixed cost of a step included."""
    _steps_beside: int = 0
    _step_s: float | None = None
    """Time of a step that reads no prompt, seconds; None before there was one."""

    def learn(self, num_prompt_tokens: int, num_other_tokens: int, seconds: float) -> None:
        """Adds the time of a step to the estimates."""
        cost = self.beside if num_other_tokens else self.alone
        cost.learn(num_prompt_tokens, num_other_tokens, seconds)
        if num_other_tokens and not num_prompt_tokens:
            self._step_s = _faded(self._step_s, seconds)

    def budget(self, unread: Sequence[int], sessions_run: bool, is_alone: bool = False) -> int:
        """Returns how many prompt tokens the next step may read, all sessions together. Call once for each step.

        Args:
            unread: tokens of each prompt that waits.
            sessions_run: whether any session is past its prompt and could be delayed.
            is_alone: whether the step only reads prompts.
        """
        if not sessions_run:
            return LARGEST_CHUNK
        if not is_alone:
            is_probe = self._steps_beside % PROBE_EVERY == 0
            self._steps_beside += 1
            if is_probe:
                return 0
        own, other = (self.alone, self.beside) if is_alone else (self.beside, self.alone)
        seconds_per_token = own.seconds_per_token
        if seconds_per_token is None:
            seconds_per_token = other.seconds_per_token
        if seconds_per_token is None:
            return SMALLEST_CHUNK
        step_share = min(MOST_SHARE, sum(1.0 if each <= LARGEST_CHUNK else LONG_SHARE for each in unread))
        if is_alone:
            step_share += 1.0  # it takes a step all the same
        chunk_s = max(self.max_added_latency_s / CHUNKS_PER_TOKEN, step_share * (self._step_s or 0.0))
        fitting = chunk_s / max(seconds_per_token, 1e-9)
        return int(min(LARGEST_CHUNK, max(SMALLEST_CHUNK, fitting)))


def _faded(old: float | None, new: float) -> float:
    return new if old is None else MEMORY * old + (1.0 - MEMORY) * new


def share(budget: int, wanted: Sequence[int], most: Sequence[int]) -> list[int]:
    """Divides a token budget among prompts: half to the oldest, the rest to the shortest first.

    So short prompts overtake long ones, prompts that arrived together finish one by one instead of all at the end, and
    no prompt starves.

    Args:
        budget: tokens.
        wanted: unread tokens of each prompt, in order of arrival.
        most: limit of each prompt in this step, tokens.

    Returns:
        The tokens of each prompt, in the order of `wanted`.
    """
    shares = [0] * len(wanted)
    first = [(0, -(-budget // 2))] if wanted else []
    shortest = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for index, part in [*first, *((index, budget) for index in shortest)]:
        given = min(most[index] - shares[index], part, budget)
        shares[index] += given
        budget -= given
    return shares
