"""Completions of many prompts, a few at a time: the part that both clients share, without threads and tasks."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index

from draftwire.client.completion import Completion
from draftwire.client.prompts import Prompt, is_several
from draftwire.client.request_maker import Options, check_number, check_seconds, naming
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError
from draftwire.method.keys import MAX_SEED

CONCURRENCY = 16
ROOM_TIMEOUT_S = 300.0
SHORTEST_PAUSE_S = 0.1
"""Least pause between attempts at a full server, even if the server asks for less."""


def seed_of(batch_seed: int, index: int) -> int:
    """Returns the seed of the prompt at an index: the first 8 bytes of the SHA-256 hash of the batch's seed, which is
    hashed as 8 bytes, plus the index, modulo 2**64. All integers are little-endian.

    Seeds within a batch are all different, and batches with close seeds share none.

    Raises:
        InvalidRequestError: the batch's seed is out of range.
    """
    if not 0 <= batch_seed <= MAX_SEED:
        raise InvalidRequestError(f"seed must be in 0..2**64 - 1, not {batch_seed}")
    first = int.from_bytes(hashlib.sha256(batch_seed.to_bytes(8, "little")).digest()[:8], "little")
    return (first + index) & MAX_SEED


@dataclass(slots=True)
class Job:
    """One prompt of a batch, with its options and retries."""

    index: int
    prompt: Prompt
    options: Options
    room_timeout_s: float
    _deadline: float | None = field(default=None, init=False)

    def check(self) -> None:
        """Refuses a list of prompts.

        Raises:
            InvalidRequestError: the prompt is a list of prompts.
        """
        if is_several(self.prompt):
            raise InvalidRequestError("each prompt of a batch is one; generate_many takes lists of them")

    def pause_after(self, error: DraftwireError) -> float | None:
        """Returns how many seconds to wait before a retry; None if the prompt is not retried. Only a full server is
        retried, for at most `room_timeout_s`.
        """
        if not isinstance(error, NoRoomError):
            return None
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self.room_timeout_s
        pause_s = max(error.retry_after_s, SHORTEST_PAUSE_S)
        return pause_s if now + pause_s <= self._deadline else None


class Batch:
    """Jobs and outcomes of a batch."""

    def __init__(
        self, prompts: object, options: Options, concurrency: int, return_exceptions: bool, room_timeout_s: float
    ) -> None:
        """Checks the options.

        Raises:
            InvalidRequestError: `prompts` is a single prompt, `num_choices` is not 1, or a number is out of range.
        """
        if isinstance(prompts, str | bytes | Mapping):
            raise InvalidRequestError("generate_batch takes several prompts: a list or another iterable of them")
        if options.get("num_choices") not in (None, 1):
            raise InvalidRequestError("generate_batch gives one completion of each prompt; generate_many gives several")
        check_seconds(options)
        check_number("room_timeout_s", room_timeout_s)
        with naming("concurrency"):
            self.concurrency = index(concurrency)
        if self.concurrency < 1:
            raise InvalidRequestError(f"concurrency must be at least 1, not {concurrency}")
        seed = options.get("seed")
        with naming("seed"):
            self._seed = None if seed is None else index(seed)
        self._options = options
        self._returns_exceptions = return_exceptions
        self._room_timeout_s = room_timeout_s
        self._outcomes: list[Completion | DraftwireError | None] = []
        if self._seed is not None:
            seed_of(self._seed, 0)

    def job(self, prompt: Prompt) -> Job:
        """Returns the job of the next prompt."""
        number = len(self._outcomes)
        self._outcomes.append(None)
        seed = None if self._seed is None else seed_of(self._seed, number)
        # The batch waits for the server once, before the first prompt.
        options: Options = {**self._options, "seed": seed, "wait_for_server_s": None}
        return Job(number, prompt, options, self._room_timeout_s)

    def finish(self, job: Job, outcome: Completion | DraftwireError) -> None:
        """Stores the outcome of a prompt.

        Raises:
            DraftwireError: the outcome, if it is an error and errors are not returned.
        """
        if isinstance(outcome, DraftwireError) and not self._returns_exceptions:
            raise outcome
        self._outcomes[job.index] = outcome

    def outcomes(self) -> list[Completion | DraftwireError]:
        """Returns the outcomes in the order of the prompts, all of which are finished."""
        return [outcome for outcome in self._outcomes if outcome is not None]
