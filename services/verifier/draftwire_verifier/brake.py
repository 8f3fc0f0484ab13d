"""Slows streams of draft blocks that nobody can use. Pure."""

BURST = 1024
"""Blocks that a stream may send for nothing at once."""
EARNED = 32
"""Blocks that it may send for nothing for each one that is judged: a drafter that drafts ahead guesses so many texts at
most, and may learn late that none came true."""
REST_S = 0.002
"""Rest for each block beyond that, seconds."""
LONGEST_REST_S = 1.0


class Brake:
    """How many blocks of a stream were for nothing: stale, refused, repeated, or more than are held.

    Blocks are decoded on the event loop, beside everybody's verdicts. Who floods a verifier with useless ones is read
    more slowly, and holds up its own blocks alone.
    """

    def __init__(self) -> None:
        """Starts with a full burst."""
        self._num_free = BURST

    def rest_s(self, num_judged: int, num_useless: int) -> float:
        """Counts blocks of a message; returns for how long to rest before the stream's next one, seconds.

        Args:
            num_judged: blocks that were queued to be judged.
            num_useless: blocks that were neither queued nor held.
        """
        self._num_free = min(BURST, self._num_free + EARNED * num_judged) - num_useless
        num_beyond = max(0, -self._num_free)
        self._num_free += num_beyond
        return min(LONGEST_REST_S, REST_S * num_beyond)
